"""Which hosts are heard of: soft state of the driver, out of which only transitions become events. Torch-free.

A heartbeat that does not come is not death: its host is unknown, until it is heard of again or the back end says that
it is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from phalanx.run.decide.events import Event, HostJoined, HostUnknown
from phalanx.run.messages import Heartbeat, Hello, HostState
from phalanx.run.now import Now
from phalanx.run.wire.addresses import Address

SILENT_HEARTBEATS = 3.5
"""After the time of so many heartbeats without one, a host is unknown."""


@dataclass
class Heard:
    """What is known of a host.

    Attributes:
        hello: how it introduced itself, last time.
        last_s: when it was heard of.
        state: its last report; None: none has come.
        is_unknown: it has been said that nothing is heard of it.
    """

    hello: Hello
    last_s: float
    state: HostState | None = None
    is_unknown: bool = False


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
    _order: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Those that are not unknown, whoever was heard of longest ago first."""
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

    def peer_of(self, host: str) -> str:
        """``address:port`` where it serves measurements of the network; empty: it does not, or is not known."""
        heard = self.hosts.get(host)
        if heard is None or not heard.hello.peer_port:
            return ""
        return str(Address(heard.hello.address, heard.hello.peer_port))

    def on_hello(self, hello: Hello, now: Now) -> list[Event]:
        """A host has connected, for the first time or again."""
        before = self.hosts.get(hello.host)
        state = before.state if before is not None else None
        self.hosts[hello.host] = Heard(hello, now.monotonic_s, state)
        self._order[hello.host] = None
        self._order.move_to_end(hello.host)
        return [HostJoined(now.unix_s, hello.host, hello.rack, hello.attempt, tuple(hello.running))]

    def on_heartbeat(self, host: str, beat: Heartbeat, now: Now) -> list[Event]:
        """It is there; if it was unknown, what it reports says what still runs on it."""
        heard = self.hosts.get(host)
        if heard is None:  # it has been forgotten meanwhile
            return []
        self.heartbeats += 1
        was_unknown, heard.is_unknown = heard.is_unknown, False
        heard.last_s, heard.state = now.monotonic_s, beat.host
        self._order[host] = None
        self._order.move_to_end(host)
        if not was_unknown:
            return []
        running = tuple(worker.rank for worker in beat.workers if worker.state != "ended")
        return [HostJoined(now.unix_s, host, heard.hello.rack, beat.attempt, running)]

    def on_gone(self, host: str) -> None:
        """The back end says that it is gone: nothing is expected of it any more."""
        self.hosts.pop(host, None)
        self._order.pop(host, None)

    def tick(self, now: Now) -> list[Event]:
        """Those of which nothing has been heard for too long, once each."""
        events: list[Event] = []
        while self._order:
            name = next(iter(self._order))
            if now.monotonic_s - self.hosts[name].last_s <= self._limit_s:
                break
            del self._order[name]
            self.hosts[name].is_unknown = True
            events.append(HostUnknown(now.unix_s, name))
        return events

    def next_look_s(self, now: Now) -> float:
        """Seconds until the next host may be unknown; infinite where none can be."""
        if not self._order:
            return float("inf")
        return max(self.hosts[next(iter(self._order))].last_s + self._limit_s - now.monotonic_s, 0.0)

    @property
    def _limit_s(self) -> float:
        return SILENT_HEARTBEATS * self.heartbeat_s
