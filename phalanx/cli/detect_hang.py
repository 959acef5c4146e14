"""`phalanx detect hang`: which rank holds up a job that stands still."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import AS_JSON

if TYPE_CHECKING:
    from phalanx.detect.detection import JudgeVerdict
    from phalanx.detect.hangs.python_stacks import Frame
    from phalanx.detect.hangs.rank_places import RankPlaces

_RANK_OF_NAME = re.compile(r"(\d{1,7})(?:\.\w{1,12})?$")
_PY_SPY_S = 10.0


@click.command("hang", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("places", nargs=-1, metavar="[RUN | DUMPS]...")
@click.option("--layout", metavar="LAYOUT|RUN", help="Such as pp4,dp2,tp2, or a run folder: what groups span.")
@click.option("--hosts", type=click.Path(path_type=Path), metavar="FILE", help="A line for each host: HOST slots=8.")
@click.option("--ranks", "count", type=click.IntRange(1, 1 << 20), metavar="N", help="Of the job; else what is named.")
@click.option("--stacks", multiple=True, metavar="FILES", help="Stacks by py-spy or faulthandler; rank at name's end.")
@click.option("--pids", metavar="PID,…", help="Processes of this host, whose stacks py-spy reads now.")
@AS_JSON
def command(
    places: tuple[str, ...],
    layout: str | None,
    hosts: Path | None,
    count: int | None,
    stacks: tuple[str, ...],
    pids: str | None,
    as_json: bool,
) -> None:
    """Which rank holds up a job that stands still.

    From a RUN folder: what each rank has begun and not ended, by its own spans. From DUMPS (files, folders or patterns)
    of torch's NCCL flight recorder: who never came to the collective in which the others wait. Stacks add to either, or
    stand alone.
    """
    from phalanx.cli.verdict_output import write_verdict

    verdict = _judged(places, layout, hosts, count, stacks, pids)
    raise SystemExit(write_verdict(verdict, as_json=as_json))


def _judged(
    places: Sequence[str],
    layout: str | None,
    hosts: Path | None,
    count: int | None,
    stacks: Sequence[str],
    pids: str | None,
) -> JudgeVerdict:
    from phalanx.core.errors import UserError
    from phalanx.detect.hangs.dump_files import DumpedJob, dump_files, read_dumped_job
    from phalanx.detect.hangs.hang_judge import HangContext, judge_hang
    from phalanx.detect.hangs.rank_motion import weighed_by_processes
    from phalanx.detect.hangs.rank_places import RankPlaces, read_hosts, read_layout
    from phalanx.detect.hangs.span_hangs import judge_run

    if not places and not stacks and not pids:
        raise UserError("nothing to judge", cure="name a run folder or dumps, or give --stacks or --pids")
    frames, states, processes = _stacks(stacks, pids)
    is_run = len(places) == 1 and (Path(places[0]) / "telemetry").is_dir()
    if is_run:
        return judge_run(Path(places[0]), stacks=frames)
    if (job := next((place for place in places if (Path(place) / "job.json").is_file()), None)) is not None:
        cure = "let its script record spans (docs/trace.md), name the run folder that it writes, or give --pids"
        raise UserError("is a job that has recorded no spans", cure=cure, value=job)
    dumped = read_dumped_job(dump_files(places)) if places else DumpedJob()
    known = None if layout is None else read_layout(layout)
    ranks = set(dumped.ranks) | frames.keys() | states.keys()
    _require_all_ranks(ranks, dumped.shows_all_ranks, known.world_size if known else None, count)
    ranks |= set(range(count or (known.world_size if known else 0)))
    world_size = max(ranks, default=-1) + 1
    host_of: Mapping[int, str] = {} if hosts is None else read_hosts(hosts, world_size)
    where: RankPlaces = RankPlaces(ranks, dumped.groups, host_of, known)
    verdict = judge_hang(
        HangContext(
            where,
            dumped.records,
            dumped.texts,
            "dumps" if places else "stacks",
            states,
            frames,
            written_s=dumped.written_s,
            problems=tuple(dumped.problems),
        )
    )
    return verdict if places else weighed_by_processes(verdict, processes)


def _require_all_ranks(seen: Collection[int], is_whole: bool, of_layout: int | None, given: int | None) -> None:
    """Options may add ranks that left nothing, and may not contradict what dumps and stacks show."""
    from phalanx.core.errors import UserError

    count = max(seen, default=-1) + 1
    shown = f"dumps and stacks are of {'' if is_whole else 'at least '}{count}"
    if given is not None and given < count:
        raise UserError(f"is fewer than there are: {shown}", cure="leave it out", field="--ranks", value=given)
    if of_layout is not None and (of_layout < count or (is_whole and of_layout != count)):
        cure = "give the layout that the job ran with"
        raise UserError(f"is of {of_layout} ranks, and {shown}", cure=cure, field="--layout")
    if of_layout is not None and given is not None and of_layout != given:
        cure = "leave one of them out"
        raise UserError(f"is of {of_layout} ranks, and --ranks says {given}", cure=cure, field="--layout")


def _stacks(
    files: Sequence[str], pids: str | None
) -> tuple[dict[int, Sequence[Frame]], dict[int, str], dict[int, int]]:
    """Frames of main threads by rank, and the states and numbers of processes that were asked."""
    from phalanx.core.errors import UserError
    from phalanx.detect.hangs.dump_files import dump_files
    from phalanx.detect.hangs.python_stacks import main_stack

    frames: dict[int, Any] = {}
    for path in dump_files(files, all_kinds=True) if files else ():
        number = _RANK_OF_NAME.search(path.name)
        if number is None:
            raise UserError(
                "does not say its rank", cure="let its name end with it, such as stack_3.txt", field=str(path)
            )
        frames[int(number[1])] = main_stack(path.read_text(errors="replace"))
    states: dict[int, str] = {}
    processes: dict[int, int] = {}
    for place, pid in enumerate(_numbers(pids) if pids else ()):
        rank, state, text = _look_at(pid, place)
        states[rank], processes[rank] = state, pid
        if text:
            frames[rank] = main_stack(text)
    if pids and not any(frames.values()) and not set(states.values()) - {"gone"}:
        raise UserError(
            "there are no such processes", cure="name ranks that run on this host", field="--pids", value=pids
        )
    if pids and not any(frames.values()):
        cure = "install py-spy (pip install py-spy), and allow ptrace (SYS_PTRACE)"
        raise UserError("no stacks could be read", cure=cure, field="--pids", value=pids)
    return frames, states, processes


def _numbers(pids: str) -> list[int]:
    from phalanx.core.errors import UserError

    try:
        return [int(word) for word in re.split(r"[\s,]+", pids.strip())]
    except ValueError as error:
        raise UserError("are no processes", cure="give numbers, such as 411,412", field="--pids", value=pids) from error


def _look_at(pid: int, place: int) -> tuple[int, str, str]:
    """Rank (by its environment, else by its place among those that were named), state, and stacks."""
    import time

    from phalanx.detect.hangs.stack_dumps import py_spy_program, stacks_of
    from phalanx.ipc.processes import read_process

    process = read_process(pid)
    state = "gone" if process is None or not process.is_alive else process.state
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        content = ""
    rank = re.search(r"(?:^|\0)RANK=(\d{1,7})(?:\0|$)", content)
    found = stacks_of(pid, time.monotonic() + _PY_SPY_S, program=py_spy_program())
    return int(rank[1]) if rank else place, state, found.text
