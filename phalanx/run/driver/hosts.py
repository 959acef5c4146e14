"""The driver's soft state of hosts: heartbeats, checks, preparation, and the messages that commands become.

A heartbeat timeout is not death: its host is unknown, until it is heard of again or the back end reports
that it is gone. What one host's template has learnt to import is passed on to those that are prepared later, and to
spares.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from phalanx.run import messages
from phalanx.run.clock import Now
from phalanx.run.decide import actions
from phalanx.run.decide.actions import Action
from phalanx.run.decide.events import CheckFailed, CheckPassed, Event, HostJoined, HostUnknown, Unprepared
from phalanx.run.messages import BadReportError, Heartbeat, Hello, HostState, Prepare, Prepared, report_of
from phalanx.run.wire.driver_address import Address

SILENT_HEARTBEATS = 3.5
"""Heartbeat intervals without a heartbeat after which a host is unknown."""


@dataclass
class Heard:
    """What is known of a host: its last `Hello` and heartbeat, and whether it was reported as unknown."""

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
    """Hosts by name; `heartbeat_s`: how often each reports; `heartbeats`: how many were heard, of all."""

    heartbeat_s: float
    hosts: dict[str, Heard] = field(default_factory=dict)
    _queue: list[tuple[float, str]] = field(default_factory=list)
    # A heap of those that are not unknown, each with a time at which it was heard of: with ten thousand hosts only the
    # few longest silent are looked at, and a host that was heard of since is put back with its newer time.
    _queued: set[str] = field(default_factory=set)
    heartbeats: int = 0
    _dismissed: dict[str, tuple[str, int]] = field(default_factory=dict)

    def dismiss(self, host: str) -> bool:
        """This host's executor does not belong to the job any more; False: the host never connected."""
        heard = self.hosts.get(host)
        if heard is not None:
            self._dismissed[host] = heard.hello.boot_id, heard.hello.pid
        return heard is not None

    def is_dismissed(self, hello: Hello) -> bool:
        """Whether it is the very executor that was dismissed, and not a new one of that host."""
        # After a repair a host may join again, with another process or after another boot.
        return self._dismissed.get(hello.host) == (hello.boot_id, hello.pid)

    def is_unknown(self, host: str) -> bool:
        """Whether nothing is heard of it, or never was."""
        heard = self.hosts.get(host)
        return heard is None or heard.is_unknown

    def on_hello(self, hello: Hello, now: Now) -> list[Event]:
        """A host has connected, for the first time or again."""
        # The last heartbeat stays: people want to see how the host was before its connection broke.
        before = self.hosts.get(hello.host)
        self.hosts[hello.host] = Heard(hello, now.monotonic_s, before.beat if before is not None else None)
        self._await(hello.host)
        return [HostJoined(now.unix_s, hello.host, hello.rack, hello.attempt, tuple(hello.running))]

    def on_heartbeat(self, host: str, beat: Heartbeat, now: Now) -> list[Event]:
        """The host is there; if it was unknown, its report tells which ranks still run on it.

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
        # It is back without a new connection, and may have been given up meanwhile: the decision has to know its ranks.
        running = tuple(worker.rank for worker in report_of(beat).workers if worker.state != "ended")
        heard.is_unknown = False
        self._await(host)
        return [HostJoined(now.unix_s, host, heard.hello.rack, beat.attempt, running)]

    def on_gone(self, host: str) -> None:
        """The back end reports that it is gone: nothing is expected of it any more."""
        self.hosts.pop(host, None)

    def tick(self, now: Now) -> list[Event]:
        """Those of which nothing has been heard for too long, once each."""
        events: list[Event] = []
        while self._queue and self._queue[0][0] + self._limit_s < now.monotonic_s:
            queued_s, name = self._queue[0]
            heard = self.hosts.get(name)
            if heard is not None and heard.last_s > queued_s:
                heapq.heapreplace(self._queue, (heard.last_s, name))
                continue
            heapq.heappop(self._queue)
            self._queued.discard(name)
            if heard is not None:
                heard.is_unknown = True
                events.append(HostUnknown(now.unix_s, name))
        return events

    def next_look_s(self, now: Now) -> float:
        """Seconds until the next host may be unknown, at least; infinite where none can be."""
        return max(self._queue[0][0] + self._limit_s - now.monotonic_s, 0.0) if self._queue else float("inf")

    def _await(self, host: str) -> None:
        if host not in self._queued:
            self._queued.add(host)
            heapq.heappush(self._queue, (self.hosts[host].last_s, host))

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
        peers: hosts that it was to test the network with, and where they serve measurements now; results for
            other addresses are left out.
    """
    names = {address: peer for peer, address in peers.items() if address}
    bad: dict[str, list[str]] = defaultdict(list)
    rates: dict[str, float] = {}
    for outcome in answer.outcomes:
        for address, why in outcome.bad_peers.items():
            if address in names:
                bad[names[address]].append(why)
        rates |= outcome.peer_rates
    bad_peers = {peer: "; ".join(whys) for peer, whys in bad.items()}
    # Between hosts that may be on one machine a rate measures its processors.
    machines = {name: heard.hello.boot_id for name in (host, *peers) if (heard := hosts.hosts.get(name)) is not None}
    here = ("", machines.get(host, ""))
    peer_rates = {
        peer: 0.0 if machines.get(peer, "") in here else rates[address]
        for address, peer in names.items()
        if address in rates
    }
    failed = [outcome for outcome in answer.outcomes if outcome.outcome == "fail"]
    if not failed:
        return CheckPassed(now.unix_s, host, answer.number, bad_peers, peer_rates)
    why = "; ".join(f"{outcome.name}: {outcome.reason}" for outcome in failed)
    is_between = all(outcome.bad_peers for outcome in failed)
    return CheckFailed(now.unix_s, host, answer.number, why, bad_peers, peer_rates, is_between)


SETTLES_S = 5.0
"""Seconds without news after which what was learnt is passed on to spares: each time costs them a template."""


class Preparing:
    """What executors prepare to run, and whether they are ready to.

    Args:
        versions: what is to be run, by the version of the code; empty: executors know by themselves.
    """

    def __init__(self, versions: Mapping[str, Prepare]) -> None:
        self._versions = versions
        self._sent: dict[str, tuple[str, Prepare]] = {}
        self._problems: dict[str, str] = {}
        self._reported: set[str] = set()
        self._ready: set[str] = set()
        self._learnt: dict[str, list[str]] = {}
        self._grown_s: float | None = None

    def on_hello(self, host: str, hello: Hello, version: str) -> Prepare | None:
        """The message for a host that has connected; the same again, for it may not have heard it."""
        known = self._sent.get(host)
        if known is not None and known[0] == version:
            return known[1]
        # Ranks that run there would be ended; a host that they run on has been prepared.
        return None if hello.running else self._make(host, version)

    def before_start(self, host: str, version: str) -> Prepare | None:
        """The message for a host that is to start ranks; None: it was sent."""
        known = self._sent.get(host)
        return None if known is not None and known[0] == version else self._make(host, version)

    def answered(self, host: str, answer: Prepared, version: str, now: Now) -> list[Event]:
        """A host is ready, or has learnt something, or cannot get ready."""
        sent = self._sent.get(host)
        if sent is None or sent[0] != version:
            return []
        if answer.problem:
            self._problems[host] = answer.problem
        else:
            self._ready.add(host)
            self._problems.pop(host, None)
            known = self._learnt.setdefault(version, [])
            if new := [name for name in answer.learnt if name not in set(known)]:
                known += new
                self._grown_s = now.monotonic_s
        # Report hosts once it is clear whether they or the script is wrong.
        unreported = {host: text for host, text in self._problems.items() if host not in self._reported}
        # If most hosts fail and none is ready it is the script: no host is to be replaced for that.
        is_common = not self._ready and 2 * len(self._problems) > len(self._sent)
        if not (self._ready or is_common):
            return []
        self._reported |= set(unreported)
        return [Unprepared(now.unix_s, host, text, is_common) for host, text in unreported.items()]

    def renew(self, is_idle: Callable[[str], bool], version: str, now: Now) -> list[tuple[str, Prepare]]:
        """Messages for idle hosts, because others have learnt more."""
        if self._grown_s is None or now.monotonic_s - self._grown_s < SETTLES_S:
            return []
        self._grown_s = None
        known = set(self._learnt.get(version, ()))
        behind = [
            host
            for host, (theirs, prepare) in self._sent.items()
            if theirs == version and host in self._ready and known - {*prepare.preload} and is_idle(host)
        ]
        return [(host, prepare) for host in behind if (prepare := self._make(host, version)) is not None]

    def forget(self, host: str) -> None:
        """It is gone."""
        self._sent.pop(host, None)
        self._forget_answer(host)

    def _make(self, host: str, version: str) -> Prepare | None:
        plain = self._versions.get(version)
        if plain is None:
            return None
        learnt = [name for name in self._learnt.get(version, ()) if name not in plain.preload]
        prepare = msgspec.structs.replace(plain, preload=[*plain.preload, *learnt])
        # What it answered before was about an older message.
        self._sent[host] = (version, prepare)
        self._forget_answer(host)
        return prepare

    def _forget_answer(self, host: str) -> None:
        self._problems.pop(host, None)
        self._reported.discard(host)
        self._ready.discard(host)


class Command(NamedTuple):
    """A message, and the host that gets it."""

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
            places = {host: place for place, host in enumerate(action.placement)}
            return [Command(host, _start(action, places[host], addresses)) for host in action.hosts]
        case actions.Stop():
            return [Command(host, messages.Stop(action.attempt, action.grace_s)) for host in action.hosts]
        case actions.Evict() | actions.Release():
            return [Command(action.host, messages.End(action.why))]
        case actions.Check():
            serving = [address for peer in action.peers if (address := peers.get(peer))]
            return [Command(action.host, messages.Check(action.number, action.kind, serving))]
        case _:
            return []


def _start(action: actions.Start, place: int, addresses: Mapping[str, str]) -> messages.Start:
    # Ranks of a host follow each other, as launchers number them.
    first = place * action.workers_per_host
    return messages.Start(
        attempt=action.attempt,
        ranks=list(range(first, first + action.workers_per_host)),
        world_size=len(action.placement) * action.workers_per_host,
        group_rank=place,
        hosts=len(action.placement),
        store_host=addresses[action.placement[0]],
        store_port=action.store_port,
        restarts=action.restarts,
    )
