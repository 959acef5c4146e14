"""What a run does that goes on: whether its ranks live, are paused or stalled, and what they are at by their own word.

One answer for `phalanx status`, `phalanx runs` and the dashboard (`phalanx.telemetry.run_list.read_run` gives it).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from phalanx.core.host import boot_id
from phalanx.core.progress import Progress, ProgressReader
from phalanx.core.units import duration

if TYPE_CHECKING:
    from phalanx.telemetry.run_presence import Life, Presence

State = Literal[
    "starting", "running", "evaluating", "saving", "ending", "stalled", "paused",
    "finished", "stopped", "failed", "died", "imported", "no step yet", "unknown",
]  # fmt: skip
"""Stalled: it lives and has made no step for longer than usual. Paused: a signal or a debugger stopped its process.
Stopped: it was asked to end before its last step. Failed: an error ended it, which it said. Died: its process is gone
without a word. Unknown: its processes are on another host, and nothing here says whether they live."""

LIVING: tuple[State, ...] = ("starting", "running", "evaluating", "saving", "ending", "stalled", "paused")

_PHASES: Mapping[str, State] = {"step": "running", "evaluate": "evaluating", "checkpoint": "saving", "end": "ending"}
_LEAST_STALL_S, _STEPS_TO_STALL = 60.0, 10
_FIRST_STEP_S = 600.0
"""The first step of a process compiles, and warms up what it computes with."""


@dataclass(frozen=True)
class RankStatus:
    """A process of the newest start. Ages in seconds; None: not known.

    Attributes:
        phase: what it does by its own word, such as ``step``; empty: not known.
        step: optimizer steps done.
        step_age_s: since the last step that this process made.
    """

    rank: int
    host: str
    pid: int
    life: Life
    phase: str
    step: int | None
    step_age_s: float | None
    phase_age_s: float | None


def rank_statuses(here: Sequence[Presence]) -> tuple[RankStatus, ...]:
    """How each rank is."""
    return tuple(_rank_status(presence, _page_of(presence)) for presence in here)


def living_state(
    here: Sequence[Presence], step_s: float | None, stalled_after_s: float | None = None
) -> tuple[State, str]:
    """What a run does that goes on, and why that is so where it is not well.

    Args:
        here: its ranks.
        step_s: a usual step; None: not known.
        stalled_after_s: without a step for so long it counts as stalled; None: see `phalanx status`.
    """
    if not here:
        return "running", ""
    pages = {presence.rank: _page_of(presence) for presence in here}
    ranks = [_rank_status(presence, pages[presence.rank]) for presence in here]
    judged = [rank for rank in ranks if rank.life != "elsewhere"]
    gone = [rank for rank in judged if rank.life == "gone"]
    if not judged:
        return "running", f"it runs on {here[0].host}: its lock is held; what it does cannot be seen from here"
    if gone and len(gone) < len(judged):
        numbers = ", ".join(str(rank.rank) for rank in gone[:8])
        return "stalled", f"rank {numbers} is gone without a word; the others wait, until their launcher ends them"
    paused = [rank for rank in judged if rank.life == "paused"]
    if paused:
        pids = " ".join(str(rank.pid) for rank in paused[:8])
        return "paused", f"process {pids} is stopped by a signal or a debugger: kill -CONT {pids} lets it go on"
    first = next((rank for rank in judged if pages[rank.rank] is not None), None)
    page = None if first is None else pages[first.rank]
    if first is None or page is None:
        return "running", ""
    state = _PHASES.get(page.phase, "starting")
    if state == "running" and not page.steps_here:
        state = "starting"
    if waited := _stalled(first, page, step_s, stalled_after_s):
        return "stalled", waited
    return state, ""


def _stalled(rank: RankStatus, page: Progress, step_s: float | None, stalled_after_s: float | None) -> str:
    """That no step has come for longer than usual; empty: all is well, or how long this takes is not known."""
    quiet_s = min((age for age in (rank.step_age_s, rank.phase_age_s) if age is not None), default=0.0)
    if page.phase != "step":
        limit_s = page.expects_ns * 1e-9
        doing = f"{page.phase!r} has taken {duration(quiet_s)}"
    elif page.steps_here:
        limit_s = max(_LEAST_STALL_S, _STEPS_TO_STALL * (step_s or page.step_took_ns * 1e-9))
        doing = f"no step for {duration(quiet_s)}"
        doing += f", where one takes {duration(step_s)}" if step_s else ""
    else:
        limit_s, doing = _FIRST_STEP_S, f"no first step for {duration(quiet_s)}"
    if stalled_after_s is not None and page.phase == "step":
        limit_s = stalled_after_s
    if not limit_s or quiet_s <= limit_s:
        return ""
    return f"{doing}; its stacks: py-spy dump --pid {rank.pid}"


def _page_of(presence: Presence) -> Progress | None:
    """What a rank on this host has written of how far it is; None: nothing that can be read."""
    if not presence.page or presence.life() == "elsewhere":
        return None
    reader = ProgressReader(presence.page)
    try:
        page = reader.read()
    finally:
        reader.close()
    return page if page is not None and page.pid == presence.pid else None


def _rank_status(presence: Presence, page: Progress | None) -> RankStatus:
    now_ns, known = time.monotonic_ns(), page is not None and presence.boot_id == boot_id()
    numbers = page.step if page is not None and (page.step or page.is_absolute) else None
    return RankStatus(
        rank=presence.rank,
        host=presence.host,
        pid=presence.pid,
        life=presence.life(),
        phase="" if page is None else page.phase,
        step=numbers,
        step_age_s=(now_ns - page.step_ended_ns) * 1e-9 if page and known and page.step_ended_ns >= 0 else None,
        phase_age_s=(now_ns - page.phase_began_ns) * 1e-9 if page and known else None,
    )
