"""What the ranks of `training.py` have written down, and how long each part of a recovery took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.recovery.job import Event

STAGES = ("script", "imported", "met", "made", "restored", "step")
"""What every rank does on its way to its first step, in order."""

PARTS = {
    "told": "the driver knows of the end",
    "stopped": "all other processes are gone",
    "checked": "the host is checked",
    "opened": "the store listens",
    "script": "both scripts begin",
    "imported": "they have imported",
    "met": "`init_process_group` is done",
    "made": "model and optimizer are made",
    "restored": "the state is restored",
    "step": "both have made a step",
}
"""Parts of a recovery by what ends them."""


@dataclass(frozen=True)
class Mark:
    """One line.

    Attributes:
        attempt: as the launcher counts restarts.
        what: has been done.
        step: its number; -1: it is about none.
        user_s, system_s, faults: CPU seconds, and pages that the kernel had to give, of the process since it began.
    """

    unix_s: float
    attempt: int
    rank: int
    pid: int
    what: str
    step: int
    user_s: float
    system_s: float
    faults: int


def read_marks(folder: Path) -> list[Mark]:
    """All that there are by now."""
    path = folder / "marks"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [_mark(line.split()) for line in lines]


def _mark(words: Sequence[str]) -> Mark:
    time_ns, attempt, rank, pid, what, step, user_s, system_s, faults = words
    numbers = int(time_ns) * 1e-9, int(attempt), int(rank), int(pid)
    return Mark(*numbers, what, int(step), float(user_s), float(system_s), int(faults))


def stepped(marks: Iterable[Mark], since_s: float, known: set[int]) -> set[int]:
    """Processes that have made a step since then and are not known."""
    return {mark.pid for mark in marks if mark.what == "step" and mark.unix_s > since_s} - known


def stage_ends(marks: Sequence[Mark], pids: set[int]) -> dict[str, float]:
    """When the last of these processes had done each stage for the first time, seconds of Unix time."""
    ends = {}
    for stage in STAGES:
        firsts = [min(m.unix_s for m in marks if m.pid == pid and m.what == stage) for pid in pids]
        ends[stage] = max(firsts)
    return ends


def costs(marks: Sequence[Mark], pids: set[int]) -> tuple[dict[str, float], dict[str, int]]:
    """CPU seconds and page faults between the stages, each of the process that took most."""
    cpu_s: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    faults: dict[str, int] = dict.fromkeys(STAGES, 0)
    for pid in pids:
        before_s, before = 0.0, 0
        for stage in STAGES:
            mark = min((m for m in marks if m.pid == pid and m.what == stage), key=lambda m: m.unix_s)
            used_s = mark.user_s + mark.system_s
            cpu_s[stage] = max(cpu_s[stage], used_s - before_s)
            faults[stage] = max(faults[stage], mark.faults - before)
            before_s, before = used_s, mark.faults
    return cpu_s, faults


def decided(events: Sequence[Event], kill_s: float) -> dict[str, float]:
    """When the driver has heard what, for the first recovery after `kill_s`."""
    later = [event for event in events if event.unix_s >= kill_s]

    def when(kind: str, choose: Callable[[Iterable[float]], float] = min) -> dict[str, float]:
        opened_s = min((e.unix_s for e in later if e.kind == "store-opened"), default=float("inf"))
        times = [e.unix_s for e in later if e.kind == kind and e.unix_s <= opened_s]
        return {kind: choose(times)} if times else {}

    found = when("worker-failed") | when("stopped", max) | when("check-passed", max) | when("store-opened")
    names = {"worker-failed": "told", "stopped": "stopped", "check-passed": "checked", "store-opened": "opened"}
    return {names[kind]: time_s for kind, time_s in found.items()}


def parts(kill_s: float, ends: dict[str, float]) -> dict[str, float]:
    """Seconds of each part, in the order of `PARTS`; those that are not known are left out."""
    seconds, before_s = {}, kill_s
    for part in PARTS:
        if part in ends:
            seconds[part] = ends[part] - before_s
            before_s = ends[part]
    return seconds
