"""Who holds up the others by flight records: real dumps, and jobs that are run until nothing moves and then dumped.

The one thing that never may be: an innocent named.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.flight_jobs import Do, Fault, Groups, Job, Run, data_parallel, megatron

from phalanx.detect.hangs.flight_records import MemberTexts, condense, read_record
from phalanx.detect.hangs.hang_analysis import HangVerdict, blame
from phalanx.run.executor.flight_recorder import as_json
from phalanx.run.judge.suspects import Suspects, find_suspects
from phalanx.run.messages import RankEvidence
from phalanx.telemetry.flight_dump import parse_dump, read_dump

DUMPS = Path(__file__).parents[3] / "shared/data/traces/flight-recorder"
real_dumps = pytest.mark.skipif(not DUMPS.exists(), reason="real dumps are not at hand")


def judged(dumps: Mapping[int, Any], count: int, silent: Collection[int] = ()) -> HangVerdict:
    """By whole dumps, by what is left of them on the way, and by text: always the same."""
    found = []
    for form in (dict, condense, lambda dump: json.loads(as_json(dump)), lambda dump: condense(condense(dump))):
        texts = MemberTexts()
        records = {rank: read_record(form(dump), texts) for rank, dump in dumps.items() if dump is not None}
        found.append(blame(records, texts, range(count), silent))
    assert all(one == found[0] for one in found)
    return found[0]


def dumps_of(run: Run, **options: Any) -> dict[int, Any]:
    return {rank: run.dump(rank, **options) for rank in run.job.ranks}


def verdict(dumps: Mapping[int, Any], count: int, silent: Collection[int] = ()) -> Suspects:
    return verdict_of({rank: as_json(d) if d else "" for rank, d in dumps.items() if rank not in silent}, count)


def verdict_of(texts: Mapping[int, str], count: int) -> Suspects:
    evidence = [RankEvidence(rank, "", state="S", flight_record=text) for rank, text in texts.items()]
    return find_suspects(evidence, {rank: f"h{rank // 4}" for rank in range(count)})


# Real incidents


@real_dumps
@pytest.mark.parametrize(("incident", "guilty"), [("gpu_error_1st", (12, 14)), ("lock_gil_1st", (9, 14))])
def test_real_incidents_name_all_who_are_guilty_and_nobody_else(incident: str, guilty: tuple[int, ...]) -> None:
    dumps = {rank: read_dump(DUMPS / incident / f"_dump_{rank}") for rank in range(16)}
    assert tuple(judged(dumps, 16).guilty) == guilty
    found = verdict(dumps, 16)
    assert (found.ranks, found.by, found.is_group) == (guilty, "collective", False)
    assert found.why.startswith(f"rank {guilty[0]} on h{guilty[0] // 4} ")
    assert found.line.startswith(f"Rank {guilty[0]} (host h{guilty[0] // 4}, ") and found.line.endswith("others wait.")


@real_dumps
@pytest.mark.parametrize("incident", ["gpu_error_1st", "lock_gil_1st"])
@pytest.mark.parametrize("lost", [0, 5, 11])
def test_a_dump_of_an_innocent_that_is_lost_changes_nothing(incident: str, lost: int) -> None:
    dumps = {rank: read_dump(DUMPS / incident / f"_dump_{rank}") for rank in range(16)}
    whole = tuple(judged(dumps, 16).guilty)
    assert tuple(judged(dumps | {lost: None}, 16).guilty) == whole
    assert verdict(dumps | {lost: None}, 16).ranks == whole


# Jobs that hang

JOBS = st.one_of(
    st.builds(data_parallel, st.sampled_from([2, 4, 8])),
    st.builds(
        lambda tp, pp, dp, ep, **more: megatron(tp, pp, dp, min(ep, tp * dp), micro_batches=2, steps=3, **more),
        st.sampled_from([1, 2]),
        st.sampled_from([1, 2, 3]),
        st.sampled_from([2]),
        st.sampled_from([1, 2, 4]),
        layers=st.sampled_from([1, 2]),
        batched=st.booleans(),
        overlap=st.booleans(),
        moe_sync=st.booleans(),
    ),
)
FORMS = st.fixed_dictionaries(
    {
        "ring": st.sampled_from([2000, 120]),
        "timing": st.booleans(),
        "only_active": st.booleans(),
        "made_before": st.integers(0, 5),
    }
)


@st.composite
def hangs(draw: st.DrawFn, kinds: Sequence[str], most: int = 3, jobs: st.SearchStrategy[Job] = JOBS) -> Run:
    """A job of which some ranks are struck in its middle third."""
    job = draw(jobs)
    faults = []
    most = min(most, max(1, len(job.ranks) // 2))
    for rank in draw(st.lists(st.sampled_from(list(job.ranks)), min_size=1, max_size=most, unique=True)):
        kind, program = draw(st.sampled_from(kinds)), job.programs[rank]
        at = draw(st.integers(len(program) // 3, 2 * len(program) // 3))
        if kind == "gpu":
            at = next(place for place in range(at, len(program)) if program[place].kind == "kernel")
        faults.append(Fault(rank, at, kind))
    run = Run(job, faults)
    assume(run.has_hung() and run.struck)
    return run


EASY = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@given(hangs(["host", "empty", "dead"], 1), FORMS)
@EASY
def test_one_rank_whose_host_stops_is_named(run: Run, form: dict[str, Any]) -> None:
    """A rank that lives and has left no record may have lost it: only who is dead or answers is named."""
    dumps, count = dumps_of(run, **form), len(run.job.ranks)
    if None in dumps.values():
        found = judged(dumps, count)
        assert not found.guilty and not found.possible and str(min(run.struck)) in found.why
        assert set(verdict(dumps, count, run.struck).ranks) == run.struck
        return
    found = judged(dumps, count)
    assert set(found.guilty) <= run.struck
    if not any(do.tag == "gradients" or do.tag == "bucket" for do in run.job.programs[0]):
        assert set(found.guilty) == run.struck == set(verdict(dumps, count).ranks)
    else:  # what it has launched and does not wait for may look as if it waited
        assert run.struck <= {*found.guilty, *found.possible} or not found.guilty


@given(hangs(["host", "empty", "dead", "gpu", "blind"]), FORMS)
@EASY
def test_whatever_befalls_them_no_innocent_is_named(run: Run, form: dict[str, Any]) -> None:
    found = judged(dumps_of(run, **form), len(run.job.ranks))
    assert set(found.guilty) <= run.struck, found
    if found.possible:
        assert run.struck & {*found.possible, *found.guilty}, found


@given(hangs(["host", "empty"]), FORMS)
@EASY
def test_all_that_are_waited_for_and_wait_for_nobody_are_named(run: Run, form: dict[str, Any]) -> None:
    found = judged(dumps_of(run, **form), len(run.job.ranks))
    idle = {rank for rank in run.struck if run.is_idle(rank)}
    assert run.waited_for() & idle <= set(found.guilty) <= run.struck


@given(hangs(["gpu"], 1))
@EASY
def test_a_gpu_that_stops_is_named_with_timing_and_else_among_its_group(run: Run) -> None:
    count = len(run.job.ranks)
    assert set(judged(dumps_of(run, timing=True), count).guilty) in ({*run.struck}, set())
    found = judged(dumps_of(run), count)
    (rank,) = run.struck
    largest = max(len(members) for members in run.job.groups.members.values() if rank in members)
    assert rank in {*found.guilty, *found.possible} and len(found.possible) <= largest


@given(st.integers(0, 7), st.integers(1, 40))
@EASY
def test_a_healthy_job_blames_nobody(rank: int, steps: int) -> None:
    run = Run(data_parallel(8, steps=steps))
    assert not run.has_hung()
    assert judged(dumps_of(run), 8) == HangVerdict()


# Rings that are too short, and dumps that are lost

DAMAGE = st.fixed_dictionaries(
    {
        "kept": st.dictionaries(st.integers(0, 23), st.integers(1, 12), max_size=24),
        "lost": st.frozensets(st.integers(0, 23), max_size=6),
    }
)
"""How many of its newest entries are left of a rank's record, and whose record is lost though the rank lives."""


def newest(dump: dict[str, Any], count: int) -> dict[str, Any]:
    """The same of a ring of so many entries."""
    return {**dump, "entries": dump["entries"][-count:]}


def damaged(run: Run, form: dict[str, Any], kept: Mapping[int, int], lost: Iterable[int] = ()) -> dict[int, Any]:
    dumps = dumps_of(run, **form)
    cut = {rank: newest(dump, kept[rank]) for rank, dump in dumps.items() if dump is not None and rank in kept}
    return {**dumps, **cut, **{rank: None for rank in lost if rank in dumps}}


@given(hangs(["host", "empty", "dead", "gpu", "blind"]), FORMS, DAMAGE)
@settings(EASY, max_examples=100)
def test_whatever_is_lost_of_their_records_no_innocent_is_named(
    run: Run, form: dict[str, Any], damage: dict[str, Any]
) -> None:
    dumps, count = damaged(run, form, **damage), len(run.job.ranks)
    dead = {rank for rank in run.struck if run.dump(rank) is None}
    found = judged(dumps, count, dead)
    assert set(found.guilty) <= run.struck, found
    if found.possible:
        assert run.struck & {*found.possible, *found.guilty}, found
    said = verdict(dumps, count, dead)
    assert run.struck & {*said.ranks} if said.is_group else {*said.ranks} <= run.struck, said


@given(hangs(["host", "empty"], 1), FORMS, DAMAGE)
@settings(EASY, max_examples=100)
def test_who_is_idle_by_its_own_record_is_named_whatever_the_others_have_lost(
    run: Run, form: dict[str, Any], damage: dict[str, Any]
) -> None:
    (guilty,) = run.struck
    kept = {rank: count for rank, count in damage["kept"].items() if rank != guilty}
    lost = damage["lost"] - {guilty}
    assume(run.is_idle(guilty) and guilty in run.waited_for_at_last(set(run.job.ranks) - lost))
    dumps = damaged(run, form, kept, lost)
    assert tuple(judged(dumps, len(run.job.ranks)).guilty) == (guilty,)
    assert verdict(dumps, len(run.job.ranks)).ranks == (guilty,)


@real_dumps
@pytest.mark.parametrize(("incident", "guilty"), [("gpu_error_1st", {12, 14}), ("lock_gil_1st", {9, 14})])
def test_of_real_incidents_any_one_record_may_be_cut(incident: str, guilty: set[int]) -> None:
    dumps = {rank: read_dump(DUMPS / incident / f"_dump_{rank}") for rank in range(16)}
    texts = {rank: as_json(dump) for rank, dump in dumps.items()}
    for rank, count in itertools.product(range(16), range(1, 16)):
        found = verdict_of({**texts, rank: as_json(newest(dumps[rank], count))}, 16)
        assert guilty - {rank} <= set(found.ranks) <= guilty, (rank, count, found)


@real_dumps
@pytest.mark.parametrize(("incident", "guilty"), [("gpu_error_1st", {12, 14}), ("lock_gil_1st", {9, 14})])
def test_of_real_incidents_any_two_dumps_may_be_lost(incident: str, guilty: set[int]) -> None:
    """Those ranks live: they answer, and have written none."""
    dumps = {rank: read_dump(DUMPS / incident / f"_dump_{rank}") for rank in range(16)}
    texts = {rank: as_json(dump) for rank, dump in dumps.items()}
    for lost in itertools.combinations(range(16), 2):
        found = verdict_of({**texts, **dict.fromkeys(lost, "")}, 16)
        assert set(found.ranks) <= guilty, (lost, found)
        if not guilty & set(lost) and incident == "lock_gil_1st":
            assert set(found.ranks) == guilty, (lost, found)


def without_groups(dump: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The same of a recorder that does not know who is in these groups."""
    lost = set(names)
    return {**dump, "pg_config": {name: one for name, one in dump["pg_config"].items() if name not in lost}}


def with_holes(dump: dict[str, Any], seed: int, share: float = 0.1) -> dict[str, Any]:
    """The same with some entries between the first and the last gone."""
    chance, entries = Random(seed), dump["entries"]
    here = [one for one in entries[1:-1] if chance.random() >= share]
    return {**dump, "entries": [*entries[:1], *here, *entries[1:][-1:]]}


def parts_lost(dump: dict[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """What may be left of a record in which something is missing."""
    yield "no pg_config", {key: value for key, value in dump.items() if key != "pg_config"}
    yield from ((f"no group {name}", without_groups(dump, [name])) for name in dump["pg_config"])
    yield from ((f"holes {seed}", with_holes(dump, seed)) for seed in range(8))


@real_dumps
@pytest.mark.parametrize(("incident", "guilty"), [("gpu_error_1st", {12, 14}), ("lock_gil_1st", {9, 14})])
def test_of_real_incidents_any_one_record_may_lack_its_groups_or_have_holes(incident: str, guilty: set[int]) -> None:
    dumps = {rank: read_dump(DUMPS / incident / f"_dump_{rank}") for rank in range(16)}
    texts = {rank: as_json(dump) for rank, dump in dumps.items()}
    for rank, dump in dumps.items():
        for what, left in parts_lost(dump):
            found = verdict_of({**texts, rank: as_json(left)}, 16)
            assert guilty - {rank} <= set(found.ranks) <= guilty, (rank, what, found)


@real_dumps
@pytest.mark.parametrize(("incident", "guilty"), [("gpu_error_1st", {12, 14}), ("lock_gil_1st", {9, 14})])
def test_of_real_incidents_any_two_records_may_lack_their_groups(incident: str, guilty: set[int]) -> None:
    dumps = {rank: read_dump(DUMPS / incident / f"_dump_{rank}") for rank in range(16)}
    texts = {rank: as_json(dump) for rank, dump in dumps.items()}
    bare = {rank: as_json(without_groups(dump, dump["pg_config"])) for rank, dump in dumps.items()}
    for one, other in itertools.combinations(range(16), 2):
        found = verdict_of({**texts, one: bare[one], other: bare[other]}, 16)
        assert set(found.ranks) <= guilty, (one, other, found)


@given(hangs(["host", "empty", "dead", "gpu", "blind"]), FORMS, st.data())
@settings(EASY, max_examples=100)
def test_who_does_not_say_its_groups_is_not_taken_for_one_that_never_came(
    run: Run, form: dict[str, Any], data: st.DataObject
) -> None:
    dumps, count = dumps_of(run, **form), len(run.job.ranks)
    dead = {rank for rank, dump in dumps.items() if dump is None}
    names = st.sets(st.sampled_from([*run.job.groups.members]), min_size=1)
    lost = data.draw(st.dictionaries(st.sampled_from([*run.job.ranks]), names, min_size=1, max_size=count - 1))
    bare = {rank: without_groups(dumps[rank], names) for rank, names in lost.items() if rank not in dead}
    found = judged({**dumps, **bare}, count, dead)
    assert set(found.guilty) <= run.struck, found
    if found.possible:
        assert run.struck & {*found.possible, *found.guilty}, found


@given(hangs(["host", "empty", "dead", "gpu", "blind"]), FORMS, st.data())
@settings(EASY, max_examples=100)
def test_whose_record_has_holes_is_not_taken_for_one_that_never_came(
    run: Run, form: dict[str, Any], data: st.DataObject
) -> None:
    """What is missing of a record of what is active is done, as far as can be seen: so only whole ones."""
    dumps, count = dumps_of(run, **{**form, "only_active": False}), len(run.job.ranks)
    dead = {rank for rank, dump in dumps.items() if dump is None}
    seeds = data.draw(st.dictionaries(st.sampled_from([*run.job.ranks]), st.integers(0, 999), min_size=1))
    torn = {rank: with_holes(dumps[rank], seed, 0.2) for rank, seed in seeds.items() if rank not in dead}
    found = judged({**dumps, **torn}, count, dead)
    assert set(found.guilty) <= run.struck, found
    if found.possible:
        assert run.struck & {*found.possible, *found.guilty}, found


@real_dumps
@given(DAMAGE)
@settings(EASY, max_examples=40)
@pytest.mark.parametrize(("incident", "guilty"), [("gpu_error_1st", {12, 14}), ("lock_gil_1st", {9, 14})])
def test_of_real_incidents_many_records_may_be_cut_and_lost(
    incident: str, guilty: set[int], damage: dict[str, Any]
) -> None:
    dumps = {rank: read_dump(DUMPS / incident / f"_dump_{rank}") for rank in range(16)}
    cut = {rank: newest(dumps[rank], count) for rank, count in damage["kept"].items() if rank in dumps}
    left = {**dumps, **cut, **{rank: None for rank in damage["lost"] if rank in dumps}}
    assert set(judged(left, 16).guilty) <= guilty
    assert set(verdict(left, 16).ranks) <= guilty


# Cases


def stopped(job: Job, rank: int, kind: str = "host") -> Run:
    """The rank stops in the middle, at the first place where it has nothing under way and another one waits for it."""
    for at in range(len(job.programs[rank]) // 4, len(job.programs[rank])):
        run = Run(job, [Fault(rank, at, kind)])
        if run.struck and run.is_idle(rank) and rank in run.waited_for():
            return run
    raise AssertionError("there is no such place")


def other(job: Job, rank: int, at: int, *instead: Do) -> Job:
    """The rank does something else at one place."""
    program = job.programs[rank]
    programs = [*job.programs]
    programs[rank] = [*program[:at], *instead, *program[at + 1 :]]
    return Job(job.groups, programs)


@pytest.mark.parametrize("instead", [{"op": "all_gather"}, {"size": (7,)}])
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_who_calls_something_else_is_named(instead: dict[str, Any], rank: int) -> None:
    job = data_parallel(8)
    at = 12
    assert job.programs[rank][at].kind == "call"
    run = Run(other(job, rank, at, replace(job.programs[rank][at], **instead)))
    found = judged(dumps_of(run), 8)
    assert tuple(found.guilty) == (rank,) and "called" in found.guilty[rank]


@pytest.mark.parametrize("rank", [0, 5])
def test_who_skips_a_collective_is_named(rank: int) -> None:
    run = Run(other(data_parallel(8), rank, 12))
    assert run.has_hung() and tuple(judged(dumps_of(run), 8).guilty) == (rank,)


def test_of_two_that_call_different_things_neither_is_named() -> None:
    job = data_parallel(2)
    run = Run(other(job, 1, 12, replace(job.programs[1][12], size=(7,))))
    found = judged(dumps_of(run), 2)
    assert not found.guilty and found.possible == (0, 1)


def test_groups_of_one_description_are_not_mixed() -> None:
    """A tensor group at its 80th collective is not behind one that is at its 100th."""
    groups = Groups()
    first, second = groups.make("TENSOR", (0, 1)), groups.make("TENSOR", (2, 3))
    world = groups.make("default_pg", range(4))
    end = [Do("call", world, "all_reduce"), Do("sync")]
    programs = [[Do("call", group, "all_reduce")] * count + end for group, count in ((first, 80), (second, 100))]
    job = Job(groups, [programs[0], programs[0], programs[1], programs[1]])
    run = Run(job, [Fault(3, 101, "host"), Fault(3, 100, "host")])
    assert tuple(judged(dumps_of(run), 4).guilty) == (3,)


def test_who_waits_for_another_in_another_group_is_innocent() -> None:
    groups = Groups()
    left, right = groups.make("LEFT", (0, 1, 2)), groups.make("RIGHT", (2, 3))
    job = Job(
        groups,
        [
            [Do("call", left, "all_reduce"), Do("sync")],
            [Do("call", left, "all_reduce"), Do("sync")],
            [Do("call", right, "all_reduce"), Do("sync"), Do("call", left, "all_reduce"), Do("sync")],
            [Do("kernel"), Do("call", right, "all_reduce"), Do("sync")],
        ],
    )
    found = judged(dumps_of(Run(job, [Fault(3, 1, "host")])), 4)
    assert tuple(found.guilty) == (3,) and "RIGHT (ranks 2, 3), in which rank 2 waits" in found.guilty[3]


def test_ids_are_of_each_rank_alone() -> None:
    run = stopped(megatron(2, 2, 2, 2, batched=True), 5)
    dumps = {rank: run.dump(rank, made_before=rank) for rank in run.job.ranks}
    assert tuple(judged(dumps, 8).guilty) == (5,)


# What dumps look like


def as_text(dump: Mapping[str, Any]) -> bytes:
    """As torch writes JSON: `pg_status` as text, 0 for unknown times, and no entries where there are none."""
    status = {key: {name: str(value) for name, value in one.items()} for key, one in dump["pg_status"].items()}
    entries = [
        entry | {"time_discovered_started_ns": entry["time_discovered_started_ns"] or 0} for entry in dump["entries"]
    ]
    return json.dumps({**dump, "pg_status": status} | ({"entries": entries} if entries else {})).encode()


def test_text_dumps_say_the_same() -> None:
    run = stopped(megatron(2, 2, 2, 2, batched=True), 5, "empty")
    dumps = dumps_of(run)
    texts = {
        rank: parse_dump(as_text({k: v for k, v in dump.items() if v or k != "entries"} | {"entries": dump["entries"]}))
        for rank, dump in dumps.items()
    }
    assert judged(texts, 8) == judged(dumps, 8) and tuple(judged(dumps, 8).guilty) == (5,)
    nothing = {"version": "2.10", "comm_lib_version": "2.27.5", "pg_config": {}, "pg_status": {}}
    assert parse_dump(json.dumps(nothing).encode())["entries"] == []


@pytest.mark.parametrize("version", ["2.1", "2.4", "2.10"])
def test_versions_differ_in_what_they_leave_out(version: str) -> None:
    missing = {"2.1": ("pg_status", "is_p2p", "thread_name"), "2.4": ("thread_name",), "2.10": ()}[version]
    run = stopped(megatron(2, 2, 2, 2, batched=True), 5)
    dumps = {}
    for rank, dump in dumps_of(run).items():
        entries = [{key: value for key, value in entry.items() if key not in missing} for entry in dump["entries"]]
        whole = {key: value for key, value in dump.items() if key not in missing}
        dumps[rank] = parse_dump(json.dumps(whole | {"version": version, "entries": entries}).encode())
    assert tuple(judged(dumps, 8).guilty) == (5,)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["entries", "pg_config", "pg_status", "state", "process_group", "record_id", "ranks", "extent"]
                ),
                x,
                max_size=4,
            )
        ),
        max_leaves=20,
    )
)
def test_no_record_is_too_wild(value: Any) -> None:
    evidence = [
        RankEvidence(0, flight_record=json.dumps(value)),
        RankEvidence(1, flight_record=json.dumps({"entries": [value]})),
    ]
    assert find_suspects(evidence, {0: "a", 1: "b"}).why


def test_what_is_sent_is_small_and_keeps_the_front() -> None:
    run = Run(data_parallel(4, steps=40), [Fault(2, 351, "host")])
    dumps = dumps_of(run)
    assert all(len(dump["entries"]) > 90 for dump in dumps.values())
    assert all(len(as_json(dump)) < 4_000 for dump in dumps.values())
    assert tuple(judged(dumps, 4).guilty) == (2,)
    deep = {**dumps[0], "entries": [entry | {"state": "scheduled"} for entry in dumps[0]["entries"]]}
    short = json.loads(as_json(deep, 4_000))
    assert len(json.dumps(short)) < 6_000 and short["left_out"] > 60
    assert short["entries"][0]["record_id"] == 0 and short["entries"][-1]["record_id"] == len(deep["entries"]) - 1


def test_a_record_of_which_nothing_could_be_sent_is_no_record_of_a_rank_with_nothing_under_way() -> None:
    run = Run(data_parallel(4, steps=40), [Fault(2, 351, "host")])
    texts = {rank: as_json(dump, 10 if rank == 0 else 1 << 16) for rank, dump in dumps_of(run).items()}
    assert json.loads(texts[0]) == {"entries": [], "left_out": len(run.dump(0)["entries"])}  # type: ignore[index]
    evidence = [RankEvidence(rank, flight_record=text, state="S") for rank, text in texts.items()]
    assert find_suspects(evidence, {rank: f"h{rank}" for rank in run.job.ranks}).ranks == (2,)


# With other evidence


def evidence_of(run: Run, **given: Mapping[int, str]) -> Iterable[RankEvidence]:
    for rank in run.job.ranks:
        dump = run.dump(rank)
        more = {field: values[rank] for field, values in given.items() if rank in values}
        yield RankEvidence(rank, flight_record=as_json(dump) if dump else "", **{"state": "S", "step": 10} | more)  # type: ignore[arg-type]


def test_who_stopped_beside_a_silent_rank_is_named_too() -> None:
    run = Run(data_parallel(8), [Fault(1, 11, "dead"), Fault(6, 11, "host")])
    assert run.struck == {1, 6}
    evidence = [one for one in evidence_of(run) if one.rank != 1]
    found = find_suspects(evidence, {rank: f"h{rank}" for rank in run.job.ranks})
    assert found.ranks == (1, 6) and found.by == "silence" and "rank 6 on h6 never came" in found.why


def test_kinds_of_evidence_that_differ_are_all_told() -> None:
    run = Run(data_parallel(8), [Fault(3, 11, "host")])
    evidence = [replace_step(one, 9) if one.rank == 5 else one for one in evidence_of(run)]
    found = find_suspects(evidence, {rank: f"h{rank}" for rank in range(8)})
    assert found.ranks == (3,) and "but by step rank 5 on h5 at step 9, most at 10" in found.why
    evidence = [replace_step(one, 9) if one.rank == 3 else one for one in evidence_of(run)]
    assert find_suspects(evidence, {rank: f"h{rank}" for rank in range(8)}).why.endswith("; so by step")


def replace_step(one: RankEvidence, step: int) -> RankEvidence:
    return RankEvidence(one.rank, one.stacks, state=one.state, step=step, flight_record=one.flight_record)


def test_a_large_job_is_judged_in_seconds() -> None:
    """2,048 ranks as 8 x 16 x 16; what is sent of a rank does not depend on how much it has recorded."""
    count, tp, dp = 2048, 8, 16
    texts = {}
    for rank in range(count):
        base = rank - rank % (tp * dp)
        members = {
            "0": ("default_pg", range(count)),
            str(1 + rank // tp): ("TENSOR", range(rank - rank % tp, rank - rank % tp + tp)),
            str(1000 + rank // (tp * dp)): ("EXPERT", range(base, base + tp * dp)),
            str(2000 + rank % (tp * dp)): ("PIPELINE", range(rank % (tp * dp), count, tp * dp)),
        }
        dump = large_dump(members, stops=rank == 777, waits=rank // (tp * dp) == 777 // (tp * dp))
        texts[rank] = as_json(dump)
    assert max(map(len, texts.values())) < 16_000
    evidence = [RankEvidence(rank, flight_record=text) for rank, text in texts.items()]
    began_s = time.process_time()
    found = find_suspects(evidence, {rank: f"h{rank // 8}" for rank in range(count)})
    took_s = time.process_time() - began_s
    assert found.ranks == (777,) and took_s < 10.0, took_s


def large_dump(members: Mapping[str, tuple[str, Sequence[int]]], *, stops: bool, waits: bool) -> dict[str, Any]:
    names = sorted(members, key=int)
    entries: list[dict[str, Any]] = []
    for number in range(491, 501):
        for place, name in enumerate(names):
            is_last = number == 500
            if is_last and stops:
                continue
            pending = is_last and (waits or members[name][0] in ("default_pg", "PIPELINE"))
            entries.append(
                {
                    "record_id": len(entries) + 90_000,
                    "pg_id": place,
                    "process_group": [name, members[name][0]],
                    "collective_seq_id": number,
                    "p2p_seq_id": 0,
                    "profiling_name": "nccl:all_reduce",
                    "state": "scheduled" if pending else "completed",
                    "input_sizes": [[8, 8]],
                    "input_dtypes": ["Float"],
                    "is_p2p": False,
                }
            )
    config = {name: {"name": name, "desc": said, "ranks": str(list(ranks))} for name, (said, ranks) in members.items()}
    return {"version": "2.9", "pg_config": config, "pg_status": {}, "entries": entries}
