"""What a driver saw and did, out of its journal, as the referee's facts.

The events of the journal are applied again, and each recovery is followed from where it was opened to where it was
concluded. Machines have numbers: first the hosts of the first attempt in order of their ranks, then the others in
order of their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx.faults.referee import Fact
from phalanx.run.decide import actions, events
from phalanx.run.decide.actions import Action
from phalanx.run.decide.decide import decide, event_from_json
from phalanx.run.decide.state import Recovery, State, initial
from phalanx.run.driver.write_ahead import Header, Note
from phalanx.run.journal import Entry

_NO_HOSTS = 3
_STOPPED_BY_PERSON = 5


@dataclass
class _OpenRecovery:
    """A recovery that goes on.

    Attributes:
        ranks: that failed by themselves, or that the evidence named, with the host that each was on.
        gone: hosts that were lost, evicted or given back.
    """

    ranks: dict[int, str] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)


@dataclass
class JournalFacts:
    """Takes in entries of a journal, oldest first; `facts` are there then.

    Args:
        ahead_s: unix time less the monotonic clock.
        machines: of the job, spares included.

    Attributes:
        names: of machines, by their numbers; empty until an attempt has begun.
        starts: the highest attempt that has begun.
        log: every event with what followed from it, for people.
    """

    ahead_s: float
    machines: int
    facts: list[Fact] = field(default_factory=list)
    state: State | None = None
    names: list[str] = field(default_factory=list)
    starts: int = 0
    log: list[str] = field(default_factory=list)
    _opened: _OpenRecovery | None = None
    _has_waited: bool = False
    _sequence: int = 0

    def take(self, entries: Iterable[Entry]) -> None:
        """Apply these, oldest first."""
        for entry in entries:
            self._sequence = entry.sequence
            if entry.kind == "note" and self.state is None:
                note = msgspec.json.decode(entry.json_text, type=Note)
                if isinstance(note, Header):
                    self.state = initial(note.policy, note.job)
            elif entry.kind == "event":
                self._apply(event_from_json(entry.json_text))

    @property
    def next_sequence(self) -> int:
        """The number of the first entry that was not taken."""
        return self._sequence + 1

    def number_of(self, host: str) -> int:
        """Of a machine; those that came later are numbered on."""
        if host not in self.names:
            self.names.append(host)
        return self.names.index(host)

    def _apply(self, event: events.Event) -> None:
        before = self.state
        assert before is not None
        self.state, done = decide(before, event)
        at_s = event.at_s - self.ahead_s
        self.log.append(f"{at_s:.3f} {_short(event)} → {self.state.phase}: {'; '.join(map(_short, done))}")
        self._begin_attempt(before, done, at_s)
        self._follow_recovery(before, event, done, at_s)
        self._note_waiting(at_s)

    def _begin_attempt(self, before: State, done: Sequence[Action], at_s: float) -> None:
        """Number the machines when the first attempt begins; see that a later one has as many hosts."""
        assert self.state is not None
        for action in done:
            if not isinstance(action, actions.OpenStore) or action.attempt <= self.starts:
                continue
            if not self.starts:
                others = [f"host-{number}" for number in range(1, self.machines + 1)]
                self.names = list(dict.fromkeys([*self.state.placement, *others]))
            elif len(self.state.placement) < len(before.placement):
                self._add(at_s, "acted", action="shrink")
            self.starts, self._has_waited = action.attempt, False

    def _follow_recovery(self, before: State, event: events.Event, done: Sequence[Action], at_s: float) -> None:
        assert self.state is not None
        if any(isinstance(action, actions.OpenIncident) for action in done):
            self._add(at_s, "detected")
        recovery = self.state.recovery or before.recovery
        if recovery is None and not any(isinstance(a, actions.Finish) for a in done):
            return
        opened = self._opened = self._opened or _OpenRecovery()
        if recovery is not None:
            self._learn(opened, recovery, before)
            # The last one that is waited for is lost and replaced with one event, after which no recovery goes on.
            opened.gone |= {
                host for host in before.placement if _is_out(self.state, host) and not _is_out(before, host)
            }
        if isinstance(event, events.SuspectsNamed):
            opened.ranks.update({rank: before.host_of(rank) or "" for rank in event.ranks})
        removed = {action.host for action in done if isinstance(action, actions.Evict | actions.Release)}
        opened.gone |= removed if recovery is not None else set()
        if self.state.recovery is None:
            if self.state.phase != "running":  # else what stood still moves again, and nothing was done
                self._conclude(opened, at_s)
            self._opened = None

    def _learn(self, opened: _OpenRecovery, recovery: Recovery, before: State) -> None:
        """Who is to blame, as far as is known now."""
        per_host = before.job.workers_per_host
        for host, failures in recovery.failures.items():
            for failure in failures:
                if failure.follows or (failure.kind == "loss" and failure.fault == "process"):
                    continue
                if failure.rank >= 0:
                    opened.ranks[failure.rank] = host
                else:
                    opened.ranks.update(dict.fromkeys(_ranks_on(before, host, per_host), host))
        opened.gone |= set(recovery.lost)

    def _conclude(self, opened: _OpenRecovery, at_s: float) -> None:
        """What was done in the end, and to whom."""
        assert self.state is not None
        ending = self.state.ending
        is_calm_end = ending is not None and ending.status in (0, _NO_HOSTS, _STOPPED_BY_PERSON)
        if is_calm_end and not opened.gone and not opened.ranks:
            return
        hosts = sorted(self.number_of(host) for host in opened.gone)
        is_stop = ending is not None and ending.status not in (0, _NO_HOSTS)
        ranks = sorted(rank for rank, host in opened.ranks.items() if host not in opened.gone)
        if (ranks or hosts) and not is_stop:
            self._add(at_s, "blamed", ranks=ranks, hosts=hosts)
        if is_stop:
            self._add(at_s, "acted", action="stop")
        elif hosts:
            self._add(at_s, "acted", action="evict", hosts=hosts)
        else:
            self._add(at_s, "acted", action="restart")

    def _note_waiting(self, at_s: float) -> None:
        """The job has ended for want of hosts."""
        assert self.state is not None
        ending = self.state.ending
        if ending is not None and ending.status == _NO_HOSTS and not self._has_waited:
            self._has_waited = True
            self._add(at_s, "acted", action="wait")

    def _add(self, at_s: float, what: str, **fields: object) -> None:
        self.facts.append(Fact(at_s, what, **fields))  # type: ignore[arg-type]


def _is_out(state: State, host: str) -> bool:
    return state.hosts[host].state in ("gone", "evicted")


def _ranks_on(state: State, host: str, per_host: int) -> range:
    place = state.place_of(host)
    return range(place * per_host, (place + 1) * per_host) if place >= 0 else range(0)


def _short(value: msgspec.Struct) -> str:
    """In one line."""
    fields = {name: getattr(value, name) for name in value.__struct_fields__ if name != "at_s"}
    return f"{type(value).__name__}({', '.join(f'{k}={str(v)[:200]!r}' for k, v in fields.items() if v)})"
