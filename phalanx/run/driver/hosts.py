"""Which hosts are heard of: soft state of the driver, out of which only transitions become events. Torch-free.

A heartbeat that does not come is not death: its host is unknown, until it is heard of again or the back end says that
it is gone.
"""

from __future__ import annotations

import heapq
from contextlib import suppress
from dataclasses import dataclass, field

from phalanx.run.decide.events import Event, HostJoined, HostUnknown
from phalanx.run.heartbeats import BadReportError, report_of
from phalanx.run.messages import Heartbeat, Hello, HostState
from phalanx.run.now import Now

SILENT_HEARTBEATS = 3.5
"""After the time of so many heartbeats without one, a host is unknown."""


@dataclass
class Heard:
    """What is known of a host.

    Attributes:
        hello: how it introduced itself, last time.
        last_s: when it was heard of.
        beat: its last heartbeat; None: none has come.
        is_unknown: it has been said that nothing is heard of it.
    """

    hello: Hello
    last_s: float
    beat: Heartbeat | None = None
    is_unknown: bool = False

    @property
    def state(self) -> HostState | None:
        """Of the last heartbeat; None: none has come, or it cannot be read."""
        with suppress(BadReportError):
            return report_of(self.beat).host if self.beat is not None else None
        return None


@dataclass
class HostWatch:
    """Hosts by name.

    Args:
        heartbeat_s: how often each reports.

    Attributes:
        heartbeats: that were heard, of all hosts.
    """

    heartbeat_s: float
    hosts: dict[str, Heard] = field(default_factory=dict)
    _queue: list[tuple[float, str]] = field(default_factory=list)
    """A heap of those that are not unknown, each with a time at which it was heard of."""
    _queued: set[str] = field(default_factory=set)
    heartbeats: int = 0
    _dismissed: dict[str, tuple[str, int]] = field(default_factory=dict)

    def dismiss(self, host: str) -> bool:
        """This host's executor is no part of the job any more; False: nothing was ever heard of it."""
        heard = self.hosts.get(host)
        if heard is not None:
            self._dismissed[host] = heard.hello.boot_id, heard.hello.pid
        return heard is not None

    def is_dismissed(self, hello: Hello) -> bool:
        """Whether it is the very executor that was dismissed, and not a new one of that host."""
        return self._dismissed.get(hello.host) == (hello.boot_id, hello.pid)

    def is_unknown(self, host: str) -> bool:
        """Whether nothing is heard of it, or never was."""
        heard = self.hosts.get(host)
        return heard is None or heard.is_unknown

    def machine_of(self, host: str) -> str:
        """What hosts of one machine have in common; empty: nothing is known of it."""
        heard = self.hosts.get(host)
        return heard.hello.boot_id if heard is not None else ""

    def on_hello(self, hello: Hello, now: Now) -> list[Event]:
        """A host has connected, for the first time or again."""
        before = self.hosts.get(hello.host)
        self.hosts[hello.host] = Heard(hello, now.monotonic_s, before.beat if before is not None else None)
        self._await(hello.host)
        return [HostJoined(now.unix_s, hello.host, hello.rack, hello.attempt, tuple(hello.running))]

    def on_heartbeat(self, host: str, beat: Heartbeat, now: Now) -> list[Event]:
        """It is there; if it was unknown, what it reports says what still runs on it.

        Raises:
            BadReportError: it cannot be read.
        """
        heard = self.hosts.get(host)
        if heard is None:  # it has been forgotten meanwhile
            return []
        self.heartbeats += 1
        heard.last_s, heard.beat = now.monotonic_s, beat
        if not heard.is_unknown:
            return []
        running = tuple(worker.rank for worker in report_of(beat).workers if worker.state != "ended")
        heard.is_unknown = False
        self._await(host)
        return [HostJoined(now.unix_s, host, heard.hello.rack, beat.attempt, running)]

    def on_gone(self, host: str) -> None:
        """The back end says that it is gone: nothing is expected of it any more."""
        self.hosts.pop(host, None)

    def tick(self, now: Now) -> list[Event]:
        """Those of which nothing has been heard for too long, once each."""
        events: list[Event] = []
        while (name := self._longest_silent(now)) is not None:
            self.hosts[name].is_unknown = True
            events.append(HostUnknown(now.unix_s, name))
        return events

    def next_look_s(self, now: Now) -> float:
        """Seconds until the next host may be unknown, at least; infinite where none can be."""
        return max(self._queue[0][0] + self._limit_s - now.monotonic_s, 0.0) if self._queue else float("inf")

    def _await(self, host: str) -> None:
        if host not in self._queued:
            self._queued.add(host)
            heapq.heappush(self._queue, (self.hosts[host].last_s, host))

    def _longest_silent(self, now: Now) -> str | None:
        """Take out a host that has been silent for too long; None: there is none."""
        while self._queue and self._queue[0][0] + self._limit_s < now.monotonic_s:
            queued_s, name = self._queue[0]
            heard = self.hosts.get(name)
            if heard is not None and heard.last_s > queued_s:
                heapq.heapreplace(self._queue, (heard.last_s, name))
                continue
            heapq.heappop(self._queue)
            self._queued.discard(name)
            if heard is not None:
                return name
        return None

    @property
    def _limit_s(self) -> float:
        return SILENT_HEARTBEATS * self.heartbeat_s
