"""The driver's soft state of hosts: heartbeats, checks, preparation, and the messages that commands become.

What hosts are told and what they answer: the driver's soft state of them.

Which hosts are heard of: soft state of the driver, out of which only transitions become events.

A heartbeat that does not come is not death: its host is unknown, until it is heard of again or the back end says that
it is gone.

What a host answers to a check, as an event.

What executors have been told to run, and whether they are ready to: soft state of the driver.

What one host's template has learnt to import is handed on to those that are prepared later, and to spares.

What the driver's actions are in messages to executors.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from phalanx.run import messages
from phalanx.run.clock import Now
from phalanx.run.decide import actions
from phalanx.run.decide.actions import Action, ranks_of
from phalanx.run.decide.events import CheckFailed, CheckPassed, Event, HostJoined, HostUnknown, Unprepared
from phalanx.run.messages import BadReportError, Heartbeat, Hello, HostState, Prepare, Prepared, report_of
from phalanx.run.wire.driver_address import Address

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


def serves_at(hello: messages.Hello) -> str:
    """``address:port`` where a host serves measurements of the network; empty: nowhere."""
    return str(Address(hello.address, hello.peer_port)) if hello.peer_port else ""


def judged(
    host: str, answer: messages.Checked, peers: Mapping[str, str], hosts: HostWatch, now: Now
) -> CheckPassed | CheckFailed:
    """Whether it has passed, and what it has found of its peers.

    Args:
        peers: hosts that it was to test the network with, and where they serve measurements now; what is said of
            other addresses is left out.
    """
    names = {address: peer for peer, address in peers.items() if address}
    bad_peers, peer_rates = _bad_peers(answer, names), _peer_rates(host, answer, names, hosts)
    failed = [outcome for outcome in answer.outcomes if outcome.outcome == "fail"]
    if not failed:
        return CheckPassed(now.unix_s, host, answer.number, bad_peers, peer_rates)
    why = "; ".join(f"{outcome.name}: {outcome.reason}" for outcome in failed)
    is_between = all(outcome.bad_peers for outcome in failed)
    return CheckFailed(now.unix_s, host, answer.number, why, bad_peers, peer_rates, is_between)


def _bad_peers(answer: messages.Checked, names: dict[str, str]) -> dict[str, str]:
    said: dict[str, list[str]] = defaultdict(list)
    for outcome in answer.outcomes:
        for address, why in outcome.bad_peers.items():
            if address in names:
                said[names[address]].append(why)
    return {peer: "; ".join(whys) for peer, whys in said.items()}


def _peer_rates(host: str, answer: messages.Checked, names: dict[str, str], hosts: HostWatch) -> dict[str, float]:
    """By name; 0 for hosts that may be on one machine, where a rate tells of its processors."""
    rates = {address: rate for outcome in answer.outcomes for address, rate in outcome.peer_rates.items()}
    here = ("", hosts.machine_of(host))
    return {
        peer: 0.0 if hosts.machine_of(peer) in here else rates[address]
        for address, peer in names.items()
        if address in rates
    }


SETTLES_S = 5.0
"""What was learnt is handed on to spares when nothing new has come for so long: each time costs them a template."""


class Preparing:
    """Of all hosts of a job.

    Args:
        versions: what is to be run, by the version of the code; empty: executors know by themselves.
    """

    def __init__(self, versions: Mapping[str, Prepare]) -> None:
        self._versions = versions
        self._told: dict[str, tuple[str, Prepare]] = {}
        self._problems: dict[str, str] = {}
        self._reported: set[str] = set()
        self._ready: set[str] = set()
        self._learnt: dict[str, list[str]] = {}
        self._grown_s: float | None = None

    def on_hello(self, host: str, hello: Hello, version: str) -> Prepare | None:
        """What a host is told that has connected; it is told the same again, for it may not have heard it."""
        known = self._told.get(host)
        if known is not None and known[0] == version:
            return known[1]
        # Ranks that run there would be ended; a host that they run on has been prepared.
        return None if hello.running else self._tell(host, version)

    def before_start(self, host: str, version: str) -> Prepare | None:
        """What a host is told before it starts ranks; None: it has been told."""
        known = self._told.get(host)
        return None if known is not None and known[0] == version else self._tell(host, version)

    def answered(self, host: str, answer: Prepared, version: str, now: Now) -> list[Event]:
        """A host is ready, or has learnt something, or cannot get ready."""
        told = self._told.get(host)
        if told is None or told[0] != version:
            return []
        if answer.problem:
            self._problems[host] = answer.problem
        else:
            self._ready.add(host)
            self._problems.pop(host, None)
            self._learn(version, answer.learnt, now)
        return self._unprepared(now)

    def renew(self, is_idle: Callable[[str], bool], version: str, now: Now) -> list[tuple[str, Prepare]]:
        """What idle hosts are told because others have learnt more."""
        if self._grown_s is None or now.monotonic_s - self._grown_s < SETTLES_S:
            return []
        self._grown_s = None
        known = set(self._learnt.get(version, ()))
        behind = [
            host
            for host, (theirs, prepare) in self._told.items()
            if theirs == version and host in self._ready and known - {*prepare.preload} and is_idle(host)
        ]
        return [(host, prepare) for host in behind if (prepare := self._tell(host, version)) is not None]

    def forget(self, host: str) -> None:
        """It is gone."""
        self._told.pop(host, None)
        self._forget_answer(host)

    def _tell(self, host: str, version: str) -> Prepare | None:
        plain = self._versions.get(version)
        if plain is None:
            return None
        learnt = [name for name in self._learnt.get(version, ()) if name not in plain.preload]
        prepare = msgspec.structs.replace(plain, preload=[*plain.preload, *learnt])
        self._told[host] = (version, prepare)
        self._forget_answer(host)
        return prepare

    def _forget_answer(self, host: str) -> None:
        self._problems.pop(host, None)
        self._reported.discard(host)
        self._ready.discard(host)

    def _learn(self, version: str, learnt: Iterable[str], now: Now) -> None:
        known = self._learnt.setdefault(version, [])
        new = [name for name in learnt if name not in set(known)]
        if new:
            known += new
            self._grown_s = now.monotonic_s

    def _unprepared(self, now: Now) -> list[Event]:
        """Hosts that have not been told of, once it is clear whether they or the script is wrong."""
        open_ones = {host: text for host, text in self._problems.items() if host not in self._reported}
        is_common = not self._ready and 2 * len(self._problems) > len(self._told)
        if not (self._ready or is_common):
            return []
        self._reported |= set(open_ones)
        return [Unprepared(now.unix_s, host, text, is_common) for host, text in open_ones.items()]


class Command(NamedTuple):
    """A message, and to whom."""

    host: str
    message: messages.FromDriver


def commands(
    action: Action, addresses: Mapping[str, str], peers: Mapping[str, str] = MappingProxyType({})
) -> list[Command]:
    """The messages that perform an action; none where it is the back end's alone, the judge's or for people.

    Args:
        addresses: of hosts, as workers of other hosts reach them; that of the host with the store is among them.
        peers: ``host:port`` where a host serves measurements of the network; empty: nowhere.
    """
    match action:
        case actions.OpenStore():
            return [Command(action.host, messages.OpenStore(action.attempt))]
        case actions.Start():
            return _starts(action, addresses)
        case actions.Stop():
            return [Command(host, messages.Stop(action.attempt, action.grace_s)) for host in action.hosts]
        case actions.Evict() | actions.Release():
            return [Command(action.host, messages.End(action.why))]
        case actions.Check():
            serving = [address for peer in action.peers if (address := peers.get(peer))]
            return [Command(action.host, messages.Check(action.number, action.kind, serving))]
        case _:
            return []


def _starts(action: actions.Start, addresses: Mapping[str, str]) -> list[Command]:
    places = {host: place for place, host in enumerate(action.placement)}
    return [Command(host, _start(action, places[host], addresses)) for host in action.hosts]


def _start(action: actions.Start, place: int, addresses: Mapping[str, str]) -> messages.Start:
    return messages.Start(
        attempt=action.attempt,
        ranks=list(ranks_of(place, action.workers_per_host)),
        world_size=len(action.placement) * action.workers_per_host,
        group_rank=place,
        hosts=len(action.placement),
        store_host=addresses[action.placement[0]],
        store_port=action.store_port,
        restarts=action.restarts,
    )
