"""A job to be looked at, made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from msgspec.structs import replace

from phalanx.detect.detection import Culprit, Detection
from phalanx.run.decide.actions import KeepDetection
from phalanx.run.messages import HostState, Interface, WorkerState
from phalanx.run.reports.recent_events import HostView, IncidentView, Item, Overview, Told, Wrote

T = 1_795_294_398.0
HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\r[bold]<script>alert(1)</script> & \u202eback [/bold]"
"""Sets the title, clears the screen, is markup of two kinds, and turns the direction of reading."""


def host(number: int, state: str = "active", **changes: Any) -> HostView:
    """With two ranks, if it is active."""
    ranks = (2 * number, 2 * number + 1) if state == "active" else ()
    workers = tuple(WorkerState(rank, 100 + rank, "running", 120, 0.1, 0.051, "step") for rank in ranks)
    view = HostView(
        name=f"host-{number}",
        state=state,
        place=number if ranks else -1,
        ranks=ranks,
        silent_s=0.3,
        seen=HostState(0.34, 64 << 30, 40 << 30, 1 << 40),
        workers=workers,
    )
    return replace(view, **changes)


def detection(number: int, sentence: str = "host-1 is slow", **changes: Any) -> KeepDetection:
    """What a judge has found."""
    who = (Culprit("host", "host-1", (2, 3), ("host-1",)),)
    found = Detection("slow host", sentence, who, confidence=0.9, why=(sentence,), then=(sentence,), advice="check")
    return replace(KeepDetection(number, T, 1, "stragglers", found), **changes)


def with_links(view: HostView, *links: Interface) -> HostView:
    """With these interfaces for training."""
    assert view.seen is not None
    return replace(view, seen=replace(view.seen, interfaces=list(links)))


def job(hosts: Sequence[HostView], **changes: Any) -> Overview:
    """That runs."""
    states = [one.state for one in hosts]
    overview = Overview(
        job="train",
        unix_s=T,
        phase="running",
        phase_s=20,
        attempt=2,
        world_size=2 * states.count("active"),
        hosts_wanted=states.count("active"),
        workers_per_host=2,
        hosts=tuple(hosts),
        hosts_by_state={state: states.count(state) for state in dict.fromkeys(states)},
        step=120,
        steps_per_s=18.23,
        step_age_s=0.1,
        quiet_s=0.1,
        limit_s=9,
        age_s=724,
        training_s=700,
        recoveries=1,
        incidents=1,
    )
    return replace(overview, **changes)


def open_incident(why: str = "rank 1 on host-0: killed by SIGKILL") -> IncidentView:
    """That is being dealt with."""
    return IncidentView(number=1, age_s=1.2, why=why)


def told(number: int, text: str, **changes: Any) -> Told:
    """Something that was said."""
    return replace(Told(number, T + number, "info", text), **changes)


def wrote(number: int, rank: int, text: str) -> Wrote:
    """A line of a rank."""
    return Wrote(number, T + number, rank, text)


class Played:
    """A source that says its items and then ends, with the job as it is in the end.

    Args:
        ends: set, it ends when all has been said; else when this is set.
    """

    def __init__(self, items: Sequence[Item], end: Overview, *, error: OSError | None = None) -> None:
        self.items, self.end, self.error = items, end, error
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def overview(self) -> Overview:
        """The job."""
        return self.end

    async def follow(self, number: int) -> AsyncIterator[Item]:
        """All that is said."""
        for item in self.items:
            yield item
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
