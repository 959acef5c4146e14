"""Recent events and the state of a job for all that read them: `status`, the live view and the API."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Literal, Protocol

import msgspec

from phalanx.run.clock import Now
from phalanx.run.decide import actions
from phalanx.run.decide.actions import Action, KeepDetection
from phalanx.run.messages import Evidence, HostState, LogLine, WorkerEnded, WorkerState

Level = Literal["info", "warning", "error", "good"]


class Told(msgspec.Struct, frozen=True, tag="told", forbid_unknown_fields=True):
    """Something for people.

    Attributes:
        incident: that it belongs to; 0: none.
        by: what saw or decided it; empty: the driver.
        quotes: the rank whose own lines it repeats, for those who have not seen them; -1: none.
    """

    number: int
    unix_s: float
    level: Level
    text: str
    host: str = ""
    incident: int = 0
    by: str = ""
    quotes: int = -1


class Wrote(msgspec.Struct, frozen=True, tag="wrote", forbid_unknown_fields=True):
    """A line that a rank wrote."""

    number: int
    unix_s: float
    rank: int
    text: str


Item = Told | Wrote

_ITEM_BYTES = 200  # in memory, for a line besides its text


class Hub:
    """The last items, in order, for one event loop.

    Lines are kept apart from the rest, so that a job that writes much does not drive out its alerts.

    Args:
        most: events that are kept.
        most_bytes: of lines that are kept; a reader that is slower misses some, which the numbers show.
    """

    def __init__(self, most: int = 2000, most_bytes: int = 16 << 20) -> None:
        self._told: deque[Told] = deque(maxlen=most)
        self._wrote: deque[Wrote] = deque()
        self._most_bytes, self._wrote_bytes = most_bytes, 0
        self._last = 0
        self._changed = asyncio.Event()
        self._is_over = False

    @property
    def last(self) -> int:
        """Number of the newest; 0: there is none."""
        return self._last

    def tell(self, action: Action, at: Now) -> None:
        """Keep what a driver's action reports to people; implements `phalanx.run.driver.driver.People`."""
        match action:
            case actions.Alert():
                self._add(Told(0, at.unix_s, action.level, action.text, action.host))
            case actions.OpenIncident():
                self._add(Told(0, at.unix_s, "warning", action.text, "", action.number, action.seen_by))
            case actions.AddToIncident():
                why = f": {action.why}" if action.why else ""
                self._add(Told(0, at.unix_s, "info", f"{action.text}{why}", "", action.number, action.by))
            case actions.CloseIncident() if action.status < 0:  # how a job has ended is shown by every view
                self._add(Told(0, at.unix_s, "good", action.text, "", action.number))

    def heard(self, host: str, message: Evidence | WorkerEnded, at: Now) -> None:
        """It is for reports only."""

    def say(self, level: Level, text: str, unix_s: float, host: str = "", *, quotes: int = -1) -> None:
        """Keep something that is not an action's."""
        self._add(Told(0, unix_s, level, text, host, quotes=quotes))

    def wrote(self, lines: Sequence[LogLine], at: Now) -> None:
        """Keep lines of ranks."""
        for line in lines:
            self._last += 1
            self._wrote.append(Wrote(self._last, at.unix_s, line.rank, line.text))
            self._wrote_bytes += _ITEM_BYTES + len(line.text)
        while self._wrote_bytes > self._most_bytes:
            self._wrote_bytes -= _ITEM_BYTES + len(self._wrote.popleft().text)
        self._changed.set()

    def since(self, number: int) -> list[Item]:
        """Those that are newer than this number, as far as they are still kept."""

        def is_newer(item: Item) -> bool:
            return item.number > number

        told, wrote = takewhile(is_newer, reversed(self._told)), takewhile(is_newer, reversed(self._wrote))
        return sorted([*told, *wrote], key=lambda item: item.number)

    async def follow(self, number: int) -> AsyncIterator[Item]:
        """Those that are newer than this number, until `close`."""
        while True:
            for item in self.since(number):
                number = item.number
                yield item
            if self._is_over:
                return
            if self._last == number:
                self._changed.clear()
                await self._changed.wait()

    @property
    def is_over(self) -> bool:
        """Nothing more will be said."""
        return self._is_over

    async def changed(self, number: int, timeout_s: float) -> bool:
        """Wait until there is something after this number, or there will be nothing; False: not in this time."""
        if self._last <= number and not self._is_over:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        return self._last > number or self._is_over

    def close(self) -> None:
        """Nothing more will be said."""
        self._is_over = True
        self._changed.set()

    def _add(self, told: Told) -> None:
        self._last += 1
        self._told.append(msgspec.structs.replace(told, number=self._last))
        self._changed.set()


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class HostView(_Value, frozen=True):
    """One host.

    Attributes:
        state: as `phalanx.run.decide.state.HostState`.
        why: it is in this state; empty: nothing to say.
        leaves: why it shall leave; empty: it stays.
        address: where workers of other hosts reach it.
        place: among the hosts of the attempt; -1: it has no ranks.
        silent_s: since it was last heard of; negative: never by this driver.
        seen, workers: its last report.
    """

    name: str
    state: str
    why: str = ""
    leaves: str = ""
    rack: str = ""
    address: str = ""
    place: int = -1
    ranks: tuple[int, ...] = ()
    silent_s: float = -1.0
    is_checking: bool = False
    seen: HostState | None = None
    workers: tuple[WorkerState, ...] = ()


class IncidentView(_Value, frozen=True):
    """The incident that is open."""

    number: int
    age_s: float
    why: str


class Overview(_Value, frozen=True):
    """A job at one moment.

    Attributes:
        phase: as `phalanx.run.decide.state.Phase`, for `phase_s`.
        hosts_wanted: that take part when all is well.
        hosts: all of them, or of very many only some, those in trouble first; hosts_by_state counts all.
        step: the newest that any rank has done; -1: none is known. When the job has ended, of all attempts: the
            highest, or their sum where the script does not number its steps.
        steps_per_s: over the last minute, of this attempt; negative: not known.
        step_age_s: since the last step; negative: not known.
        quiet_s: since anything of the job moved, a step or else; limit_s: after which it is looked into; negative: not
            known.
        age_s: since the job began.
        training_s: of that, while an attempt has made steps.
        refused: that executors of another version want to take part, and what to do; empty: none does.
        checkpoints: what storage can keep up with, where it cannot keep up with what is asked for.
        detections: the newest of what judges have found, the last one last; `detection_count`: of all.
        status: with which the job has ended, and `ended` why; None: it has not.
    """

    job: str
    unix_s: float
    phase: str
    phase_s: float
    attempt: int
    world_size: int
    hosts_wanted: int
    workers_per_host: int
    hosts: tuple[HostView, ...]
    hosts_by_state: dict[str, int] = {}
    step: int = -1
    steps_per_s: float = -1.0
    step_age_s: float = -1.0
    quiet_s: float = -1.0
    limit_s: float = -1.0
    age_s: float = 0.0
    training_s: float = 0.0
    recoveries: int = 0
    incidents: int = 0
    incident: IncidentView | None = None
    version: str = ""
    advise_only: bool = False
    status: int | None = None
    ended: str = ""
    checkpoints: str = ""
    refused: str = ""
    detections: tuple[KeepDetection, ...] = ()
    detection_count: int = 0


SHOWN_HOSTS = 256  # so many a source shows, those in trouble first: a view is looked at, and 12,500 rows are not


class Source(Protocol):
    """Where a view gets a job from: the driver in this process, or its API."""

    async def overview(self) -> Overview:
        """The job now. Raises OSError: the driver cannot be reached; it may be again."""
        ...

    def follow(self, number: int) -> AsyncIterator[Item]:
        """What is said after this number; ends, or raises OSError, where the driver cannot be reached any more."""
        ...
