"""Jobs that hang, generated: who is guilty is known, and the dumps are those that torch would write.

What befalls a job is drawn from a seed: the layout, the ranks, the place in their programs, which dumps are lost and
how long the ring is. The job itself is run by `support.flight_jobs` until nothing moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from phalanx.core.layout import Layout
from phalanx.detect.detection import JudgeVerdict
from phalanx.detect.hangs.dump_files import DumpedJob
from phalanx.detect.hangs.hang_judge import HangContext, judge_hang
from phalanx.detect.hangs.rank_places import RankPlaces
from support.flight_jobs import Do, Fault, Job, Run, data_parallel, megatron

LAYOUTS: Sequence[tuple[int, int, int, int]] = (
    *((1, 1, 2, 1), (1, 1, 4, 1), (1, 1, 8, 1), (2, 2, 2, 2), (2, 2, 4, 4), (4, 2, 2, 4), (2, 4, 4, 4)),
    *((4, 4, 4, 8), (8, 4, 4, 8)),
)
"""Tensor, pipeline, data and expert ranks: 2 to 128."""

LARGE: Sequence[tuple[int, int, int, int]] = ((8, 8, 8, 8), (8, 8, 16, 8))


@dataclass(frozen=True)
class HangCase:
    """A job that hangs, or does not.

    Attributes:
        guilty: ranks that brought it about.
        dumps: by rank; of those that left none, nothing.
        count: ranks of the job.
    """

    family: str
    guilty: frozenset[int]
    dumps: Mapping[int, Mapping[str, Any]]
    count: int


def judged(case: HangCase) -> JudgeVerdict:
    """What the judge says of it, by its dumps alone."""
    job = DumpedJob()
    for rank, dump in case.dumps.items():
        job.add(rank, dump)
    places = RankPlaces(range(case.count), job.groups, {rank: f"h{rank // 8}" for rank in range(case.count)})
    return judge_hang(HangContext(places, job.records, job.texts))


def ranks_named(verdict: JudgeVerdict) -> frozenset[int]:
    """Ranks that it accuses, of machines or of programs; not those of which one may be at fault."""
    return frozenset(
        rank for found in verdict.detections for who in found.who if who.kind == "rank" for rank in who.ranks
    )


def ranks_possible(verdict: JudgeVerdict) -> frozenset[int]:
    """Ranks of which it says that one is at fault."""
    return frozenset(
        rank for found in verdict.detections for who in found.who if who.kind == "group" for rank in who.ranks
    )


def draw(family: str, seed: int, layouts: Sequence[tuple[int, int, int, int]] = LAYOUTS) -> HangCase | None:
    """One case; None: what was drawn does not make the job hang."""
    random = Random(f"{family} {seed}")
    tp, pp, dp, ep = random.choice(layouts)
    if tp == pp == 1 and ep == 1:
        job = data_parallel(dp, steps=3)
    else:
        job = megatron(tp, pp, dp, ep, micro_batches=2, steps=2, batched=random.random() < 0.3)
    return FAMILIES[family](random, job, family)


def _middle(random: Random, job: Job, rank: int) -> int:
    length = len(job.programs[rank])
    return random.randint(length // 3, 2 * length // 3)


def _few(random: Random, job: Job, most: int) -> list[int]:
    most = min(most, max(1, len(job.ranks) // 2 - (len(job.ranks) % 2 == 0)))
    return sorted(random.sample(list(job.ranks), max(1, most)))


def _dumped(
    random: Random, run: Run, family: str, guilty: Sequence[int], lost: Sequence[int] = (), **options: Any
) -> HangCase | None:
    if not run.has_hung() or not set(guilty) <= {*run.struck, *guilty}:
        return None
    options = {"made_before": random.randint(0, 5), **options}
    dumps = {rank: run.dump(rank, **options) for rank in run.job.ranks if rank not in lost}
    return HangCase(family, frozenset(guilty), {r: d for r, d in dumps.items() if d is not None}, len(run.job.ranks))


def _struck(
    kind: str, most: int = 1, lose: float = 0.0, **options: Any
) -> Callable[[Random, Job, str], HangCase | None]:
    def make(random: Random, job: Job, family: str) -> HangCase | None:
        faults = []
        for rank in _few(random, job, most):
            at = _middle(random, job, rank)
            if kind == "gpu":
                program = job.programs[rank]
                at = next((place for place in range(at, len(program)) if program[place].kind == "kernel"), at)
            faults.append(Fault(rank, at, kind))
        run = Run(job, faults)
        guilty = sorted(run.struck)
        if not guilty:
            return None
        others = [rank for rank in job.ranks if rank not in guilty]
        lost = random.sample(others, min(len(others) - 1, max(1, round(lose * len(others))))) if lose else []
        return _dumped(random, run, family, guilty, lost, **options)

    return make


def _program(change: Callable[[Do], list[Do]]) -> Callable[[Random, Job, str], HangCase | None]:
    """One rank's program calls something else once: its peers are at least two, so that it is the odd one."""

    def make(random: Random, job: Job, family: str) -> HangCase | None:
        rank = random.choice(list(job.ranks))
        program = list(job.programs[rank])
        calls = [
            place
            for place, do in enumerate(program)
            if do.kind == "call" and do.op != "all_to_all" and len(job.groups.members[do.group]) > 2
        ]
        if not calls:
            return None
        place = random.choice(calls)
        program[place : place + 1] = change(program[place])
        programs = [program if one == rank else old for one, old in enumerate(job.programs)]
        return _dumped(random, Run(Job(job.groups, programs)), family, [rank])

    return make


def _healthy(random: Random, job: Job, family: str) -> HangCase:
    run = Run(job)
    assert not run.has_hung()
    return HangCase(family, frozenset(), {rank: run.dump(rank) or {} for rank in job.ranks}, len(job.ranks))


def _other_op(do: Do) -> list[Do]:
    return [replace(do, op="all_reduce" if do.op != "all_reduce" else "_all_gather_base")]


def dump_at_rest(layout: Layout, rank: int, guilty: int, calls: int = 4) -> dict[str, Any]:
    """Of a rank of a job of any size that hangs since `guilty` left its tensor group: written down, not simulated.

    Its peers of that group wait there; ranks whose data group has one of these wait in that; all others in the sum over
    all ranks.
    """
    stuck = set(layout.members(guilty, ("tensor",)))
    groups = {
        "TENSOR_MODEL_PARALLEL_GROUP": layout.members(rank, ("tensor",)),
        "DATA_PARALLEL_GROUP": layout.members(rank, ("replicate",)),
        "default_pg": tuple(range(layout.world_size)),
    }
    if rank in stuck:
        waits_in = "" if rank == guilty else "TENSOR_MODEL_PARALLEL_GROUP"
    else:
        waits_in = "DATA_PARALLEL_GROUP" if stuck & {*groups["DATA_PARALLEL_GROUP"]} else "default_pg"
    entries: list[dict[str, Any]] = []
    order = list(groups)
    for number in range(1, calls + 2):
        for place, description in enumerate(order):
            is_last = number == calls + 1
            if is_last and (not waits_in or place > order.index(waits_in)):
                continue
            entries.append(
                {
                    "record_id": len(entries),
                    "pg_id": place,
                    "process_group": [str(place), description],
                    "collective_seq_id": number,
                    "p2p_seq_id": 0,
                    "profiling_name": "nccl:all_reduce",
                    "time_created_ns": 1_758_610_505_000_000_000 + len(entries) * 1_000_000,
                    "input_sizes": [[64]],
                    "input_dtypes": ["Float"],
                    "state": "scheduled" if is_last and description == waits_in else "completed",
                    "is_p2p": False,
                }
            )
    texts = {name: _members_text(members) for name, members in groups.items()}
    config = {str(i): {"name": str(i), "desc": name, "ranks": texts[name]} for i, name in enumerate(order)}
    return {"version": "2.9", "pg_config": config, "entries": entries}


@functools.lru_cache(4)
def _members_text(members: tuple[int, ...]) -> str:
    return str(list(members))


FAMILIES: Mapping[str, Callable[[Random, Job, str], HangCase | None]] = {
    "host stops": _struck("host"),
    "host stops, ring of 40": _struck("host", ring=40),
    "host stops, only what is active": _struck("host", only_active=True),
    "two or three hosts stop": _struck("host", most=3),
    "host stops, 10 % of dumps lost": _struck("host", lose=0.1),
    "empty dump": _struck("empty"),
    "no dump": _struck("dead"),
    "no dump, 10 % of others lost": _struck("dead", lose=0.1),
    "GPU fails": _struck("blind"),
    "two or three GPUs fail": _struck("blind", most=3),
    "kernel hangs, with timing": _struck("gpu", timing=True),
    "kernel hangs": _struck("gpu"),
    "another operation": _program(_other_op),
    "another size": _program(lambda do: [replace(do, size=tuple(2 * side for side in do.size))]),
    "a call left out": _program(lambda do: []),
    "healthy": _healthy,
}
"""What befalls the job, by name."""
