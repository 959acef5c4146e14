"""The driver: turns what it hears into events, and performs what `phalanx.run.decide` has decided.

Whom the driver talks to.

Everything happens on one event loop, one thing after another. Nothing here decides: see `phalanx.run.decide`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from phalanx.run import messages
from phalanx.run.backends.base import Listener
from phalanx.run.clock import Now, read_clocks
from phalanx.run.decide import actions, events
from phalanx.run.decide.actions import Action, ranks_of
from phalanx.run.decide.events import Event, SuspectsNamed
from phalanx.run.decide.state import State, next_deadline
from phalanx.run.driver.attempt import AttemptWatch
from phalanx.run.driver.host_comparison import Peers, PeersConfig
from phalanx.run.driver.hosts import HostWatch, Preparing, commands, judged, serves_at
from phalanx.run.driver.judgements import BEFORE_S, Findings, LineBudget, Look, by_its_end
from phalanx.run.driver.write_ahead import Aside, Book, GroupCommit
from phalanx.run.judge.step_limits import MOST_WIDENED_S, LimitConfig
from phalanx.run.logs.log_lines import share_of
from phalanx.run.messages import BadReportError, report_of
from phalanx.run.wire.codec import KeptMessage
from phalanx.run.wire.connection import Mark


class Line(Protocol):
    """What the driver needs of `phalanx.run.wire.server.ExecutorServer`."""

    def send(self, host: str, message: messages.FromDriver) -> bool:
        """Send, if the host is connected."""
        ...

    def mark(self, host: str) -> Mark | None:
        """How far the messages of this host were received."""
        ...

    def acknowledge(self, host: str) -> None:
        """All messages of this host up to its mark are received for good."""
        ...


class People(Protocol):
    """Who is told."""

    def tell(self, action: Action, at: Now) -> None:
        """Something has been decided; alerts and what is about incidents is for people, the rest as they like."""
        ...

    def heard(self, host: str, message: messages.Evidence | messages.WorkerEnded, at: Now) -> None:
        """An executor has said something that may explain what went wrong."""
        ...

    def wrote(self, lines: Sequence[messages.LogLine], at: Now) -> None:
        """Ranks have written lines; with very many not all of them are told."""
        ...


class Orders(Protocol):
    """Where what the back end shall do is put, to be done in this order."""

    def arrived(self, host: str) -> None:
        """An executor has connected; what is put later is decided with that in mind, what was put before is not."""
        ...

    def put(self, action: actions.AskForHosts | actions.Evict | actions.Release) -> None:
        """The back end's part."""
        ...


_log = logging.getLogger(__name__)

NO_PROGRESS_AGAIN_S = 60.0
"""That no step is made is told again if nothing was decided then."""

_JUDGE_S = 1.0
"""Of the time for evidence, what is left for judging it."""


ClassOf = Callable[[messages.WorkerEnded], events.Fault | None]
"""The class of the fault that ended a rank, by its own last words; None: they do not tell."""

NameSuspects = Callable[[State, Sequence[messages.RankEvidence], float], SuspectsNamed]
"""Who is to blame, by the evidence; at a time of the events' clock."""


@dataclass(frozen=True)
class Settings:
    """How the driver watches.

    Attributes:
        heartbeat_s: how often executors report.
        limits: how long a job may make no step.
        peers: how hosts are held against each other; the heartbeat is that above.
        versions: what executors are told to run, by the version of the code; empty: they know.
    """

    heartbeat_s: float = 1.0
    limits: LimitConfig = field(default_factory=LimitConfig)
    peers: PeersConfig = field(default_factory=PeersConfig)
    versions: Mapping[str, messages.Prepare] = field(default_factory=dict)


class Driver:
    """One job's.

    Args:
        book: its state.
        line: to executors.
        orders: to the back end.
        people: who is told.
        classify: the class of the fault that ended a rank.
        name_suspects: the judge of evidence.
        settings: of watching.
        clocks: the time.
        aside: to write the journal while everything else goes on; None: each event waits for the disk.

    Attributes:
        hosts: of which has been heard.
        attempt: the present one; None: none has been started.
        finished: how the job has ended; None: it has not.
        on_change: called after something has been decided.
    """

    def __init__(
        self,
        book: Book,
        line: Line,
        orders: Orders,
        people: People,
        classify: ClassOf,
        name_suspects: NameSuspects,
        settings: Settings,
        clocks: Callable[[], Now] = read_clocks,
        aside: Aside | None = None,
    ) -> None:
        self._book, self._line, self._orders, self._people = book, line, orders, people
        self._classify, self._name_suspects = classify, name_suspects
        self._settings, self._clocks = settings, clocks
        self._commits = GroupCommit(book, self._perform, line.acknowledge, lambda: self.on_change(), aside)
        self.hosts = HostWatch(settings.heartbeat_s)
        self.attempt: AttemptWatch | None = None
        self.finished: actions.Finish | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._gathering: Look | None = None
        self._told_hang_s: float | None = None
        self._findings, self._preparing = Findings(), Preparing(settings.versions)
        self._peers: Peers | None = None
        self._lines = LineBudget(book.state.job.hosts)

    @property
    def state(self) -> State:
        """What has been decided so far."""
        return self._book.state

    @property
    def problem(self) -> Exception | None:
        """Why this driver has to end although the job has not, such as a journal that cannot be written; None: nothing.

        The next driver goes on from what was written down.
        """
        return self._commits.problem

    def step_down(self, why: Exception) -> None:
        """Do nothing any more, and leave the job to the next driver."""
        self._commits.problem = why
        self.on_change()

    def begin(self) -> None:
        """Do what has to be done at the start; an attempt that an earlier driver has begun is watched from now on."""
        if self.state.has_workers and self.state.attempt:
            self._watch(self.state.attempt, self.state.world_size)
        for action in self._book.first_actions:
            self._perform(action, self._clocks().unix_s)

    def listener(self) -> Listener:
        """What the back end shall call."""
        return Listener(self._on_host_gone, self._on_time_short)

    # From executors

    def on_hello(self, host: str, hello: messages.Hello) -> None:
        """An executor has connected, for the first time or again."""
        now = self._clocks()
        if self.hosts.is_dismissed(hello):  # it has not heard it, or not yet ended
            self._line.send(host, messages.End("this host is no part of the job any more"))
            return
        # In order with what is decided: who has asked for one host less must not take it for begun still.
        self._commits.then(partial(self._orders.arrived, host))
        self._book.meet(host, hello.address, now.unix_s, serves_at(hello))
        job = self.state.job
        welcome = messages.Welcome(
            messages.VERSION, job.name, self.state.attempt, self._settings.heartbeat_s, share_of(job.hosts)
        )
        self._line.send(host, welcome)
        if (prepare := self._preparing.on_hello(host, hello, self.state.version)) is not None:
            self._line.send(host, prepare)
        self._feed(self.hosts.on_hello(hello, now), host)

    def on_heartbeats(self, beats: Sequence[tuple[str, messages.Heartbeat]]) -> dict[str, str]:
        """What executors report once a second; hosts whose report cannot be read, and why.

        Raises:
            JournalError, JournalLostError: what follows from it could not be written down; see `on_message`.
        """
        if (problem := self.problem) is not None:
            raise problem
        now, bad = self._clocks(), dict[str, str]()
        for host, beat in beats:
            try:
                self._hear(host, beat, now)
            except BadReportError as error:
                bad[host] = str(error)
        return bad

    def on_message(self, host: str, message: KeptMessage) -> bool:
        """What an executor reports else.

        Returns:
            It is not written down yet; the line's `acknowledge` is called when it is.

        Raises:
            JournalError, JournalLostError: it could not be written down, and this driver has to end (`problem`).
        """
        self._feed(self._events_of(host, message, self._clocks()), host)
        return self._commits.owes(host)

    def on_disconnected(self, host: str, why: str) -> None:
        """A connection has ended. That says nothing about the host: it comes back, or it falls silent."""
        _log.info("the connection of %s has ended: %s", host, why)

    # From people

    def ask(self, make: Callable[[float], Event]) -> None:
        """A person's order: an event, given the time."""
        self._feed([make(self._clocks().unix_s)])
        self._commits.settle()

    # Time

    def tick(self) -> None:
        """Do what is due."""
        now = self._clocks()
        # Silence before progress: ranks of hosts that nobody hears must not count as ranks that make no step.
        if silent := self.hosts.tick(now):
            self._feed(silent)
            self._fall_silent(now)
        self._look_at_progress(now)
        self._look_at_peers(now)
        self._judge_evidence(now)
        for host, prepare in self._preparing.renew(self._is_idle, self.state.version, now):
            self._line.send(host, prepare)
        # Deadlines are part of the state, not timers of this process: a driver that was started again keeps them.
        due_s = next_deadline(self.state)
        if due_s is not None and due_s <= now.unix_s:
            self._feed([events.Tick(now.unix_s)])

    def next_tick_s(self) -> float:
        """Seconds until `tick` is wanted, if nothing else happens; may be infinite."""
        now = self._clocks()
        waits = [self.hosts.next_look_s(now)]
        if (due_s := next_deadline(self.state)) is not None:
            waits.append(due_s - now.unix_s)
        if self._gathering is not None:
            waits.append(self._gathering.left_s(now))
        if self.attempt is not None and self._is_watched:
            waits.append(max(self.attempt.next_look_s(now), 0.0) or self._settings.heartbeat_s)
        return max(min(waits), 0.0)

    # From the back end

    def _on_host_gone(self, host: str, why: str) -> None:
        now = self._clocks()
        if self.hosts.dismiss(host):
            # It may live on where the back end has lost sight of it, as under a node's daemon that has died.
            self._line.send(host, messages.End("the back end says that this host is gone"))
        self.hosts.on_gone(host)
        self._findings.forget(host)
        self._preparing.forget(host)
        self._feed([*self._caught_up(now), events.HostGone(now.unix_s, host, why)])

    def _on_time_short(self, left_s: float) -> None:
        self._feed([events.TimeShort(self._clocks().unix_s, left_s)])

    # What is heard, as events

    def _hear(self, host: str, beat: messages.Heartbeat, now: Now) -> None:
        """Of ten thousand hosts this is done ten thousand times a second."""
        if beat.line_count and self._lines.take(beat.line_count, beat.rank, now):
            self._people.wrote([*self._lines.left_out(beat.rank), *report_of(beat).lines], now)
        if self._peers is not None:
            self._peers.on_heartbeat(host, beat, now)
        if told := self.hosts.on_heartbeat(host, beat, now):
            self._feed(told)
        # Steps themselves stay soft state. Only transitions (first step, a phase, a new limit) come back as events, so
        # that the journal grows with what happens and not with time.
        if self.attempt is not None and (told := self.attempt.on_heartbeat(beat, now)):
            self._feed(told)

    def _events_of(self, host: str, message: KeptMessage, now: Now) -> list[Event]:
        match message:
            case messages.WorkerEnded():
                self._people.heard(host, message, now)
                return self.attempt.on_ended(message, now) if self.attempt else []
            case messages.StoreOpened(attempt=attempt, problem=problem) if problem:
                return [events.StoreFailed(now.unix_s, attempt, problem)]
            case messages.StoreOpened():
                return [events.StoreOpened(now.unix_s, message.attempt, message.port)]
            case messages.Started(attempt=attempt, problem=problem) if problem:
                return [events.StartFailed(now.unix_s, attempt, host, problem)]
            case messages.Started():
                return [events.Started(now.unix_s, message.attempt, host)]
            case messages.Stopped():
                return [events.Stopped(now.unix_s, message.attempt, host, tuple(message.stuck))]
            case messages.Checked():
                return [judged(host, message, self._peers_of(host), self.hosts, now)]
            case messages.Prepared():
                return self._preparing.answered(host, message, self.state.version, now)
            case messages.Found():
                return self._findings.take(host, message, self._report, now)
            case messages.Evidence():
                self._people.heard(host, message, now)
                self._take_evidence(host, message)
        return []

    def _peers_of(self, host: str) -> dict[str, str]:
        """With whom it was to test the network, and where these serve measurements."""
        asked = self.state.checks.get(host)
        return {peer: self._book.peers.get(peer, "") for peer in (asked.peers if asked is not None else ())}

    def _take_evidence(self, host: str, evidence: messages.Evidence) -> None:
        if self._gathering is not None:
            self._gathering.add(host, evidence)

    # Steps that do not come

    @property
    def _is_watched(self) -> bool:
        """Whether steps are expected: of processes that have all been started."""
        return self.state.phase == "running" or (self.state.phase == "starting" and not self.state.awaited)

    def _look_at_progress(self, now: Now) -> None:
        if self.attempt is None or not self._is_watched:
            return
        if self._told_hang_s is not None:
            if self.state.recovery is not None or now.monotonic_s - self._told_hang_s < NO_PROGRESS_AGAIN_S:
                return
            self._told_hang_s = None  # nothing came of it: nobody was heard of, or steps were made again
        # Nobody is blamed here: the event says how the ranks stand, and the judges name a suspect once stack traces and
        # flight records of the ranks have come.
        standing = self.attempt.standing(now)
        if standing.kind == "moving":
            return
        told = self.attempt.no_progress(standing, now)
        if standing.kind == "long":
            self._feed([told])
            return
        self._told_hang_s = now.monotonic_s
        self._feed([*self._caught_up(now), told])

    def _fall_silent(self, now: Now) -> None:
        """Of some hosts nothing is heard: what they wrote or evaluated then may have ended, or they have."""
        state = self.state
        places = [place for place, host in enumerate(state.placement) if self.hosts.is_unknown(host)]
        if self.attempt is None or 2 * len(places) > len(state.placement):  # it may be the driver that is cut off
            return
        self.attempt.fall_silent([r for place in places for r in ranks_of(place, state.job.workers_per_host)], now)

    def _caught_up(self, now: Now) -> list[Event]:
        """How far the attempt was, for whoever has to know what is lost."""
        return self.attempt.catch_up(now) if self.attempt is not None else []

    def _look_at_peers(self, now: Now) -> None:
        """Hold the hosts of the attempt against each other, while it runs."""
        attempt, heard = self.attempt, self.hosts.hosts
        if attempt is None or self.state.phase != "running":
            return
        if self._peers is None and all(host in heard for host in self.state.placement):
            machines = {host: heard[host].hello.boot_id for host in self.state.placement}
            self._peers = Peers(attempt.attempt, machines, self._settings.peers, now)
        if self._peers is not None:
            self._feed(self._peers.look(attempt.standing(now), attempt.is_paused(now), now))

    # Hosts

    def _is_idle(self, host: str) -> bool:
        """Whether it may be told to prepare anew: not where ranks run, nor where they are about to."""
        return self.state.has_workers and not self.state.has_place(host)

    def _fault_of(self, ended: messages.WorkerEnded) -> events.Fault:
        host, said = self.state.host_of(ended.rank) or "", self._classify(ended)
        return self._findings.fault_of(host, ended, said, self._clocks()) or by_its_end(ended)

    @property
    def _report(self) -> int:
        """The incident that is open; 0: none."""
        return self.state.incident.number if self.state.incident is not None else 0

    def _judge_evidence(self, now: Now) -> None:
        look = self._gathering
        if look is not None and look.is_over(now):
            self._gathering = None
            # Evidence of an attempt that has ended meanwhile says nothing about the ranks of this one.
            if look.attempt == self.state.attempt:
                self._feed([self._name_suspects(self.state, look.evidence(), now.unix_s)])

    def _gather(self, hosts: Sequence[str], now: Now) -> Look:
        state = self.state
        within_s = max(state.policy.evidence_s - _JUDGE_S, state.policy.evidence_s / 2)
        places = {host: ranks_of(place, state.job.workers_per_host) for place, host in enumerate(state.placement)}
        for host in hosts:
            self._line.send(host, messages.Gather(state.attempt, [], within_s))
        return Look(state.attempt, {host: places[host] for host in hosts if host in places}, now, within_s)

    # What is decided

    def _feed(self, told: Sequence[Event], host: str = "") -> None:
        """Apply events in order; they are written down before what follows from them is performed.

        A driver that cannot write down what has happened must not go on: what it knows besides the journal is ahead.
        """
        if (problem := self.problem) is not None:
            raise problem
        if not told:
            return
        # The mark says up to which message of this host all is in the journal. It is written with the event, in one
        # transaction, so that after a crash a message is neither lost nor taken twice.
        mark = self._line.mark(host) if host else None
        received = {host: mark} if mark is not None else None
        for event in told:
            self._take(event, received)
        # An incident may just have been opened: what log rules said shortly before is part of its report.
        if self._report:
            now = self._clocks()
            quiet_s = self.attempt.standing(now).age_s if self.attempt is not None else 0.0
            for event in self._findings.led_to(self._report, BEFORE_S + quiet_s, now):
                self._take(event, None)
        self._commits.put_off(host if mark is not None else "")

    def _take(self, event: Event, received: Mapping[str, Mark] | None) -> None:
        for action in self._commits.take(event, received):
            self._expect(action)

    def _expect(self, action: Action) -> None:
        """What the driver itself has to know of a decision before anything else is heard."""
        # Actions are performed after the journal is on disk, events are taken before: no rank of the new attempt may be
        # heard by a driver that still watches the old one.
        if isinstance(action, actions.Start):
            self._watch(action.attempt, len(action.placement) * action.workers_per_host)
        elif isinstance(action, actions.Evict | actions.Release):
            self.hosts.dismiss(action.host)

    def _perform(self, action: Action, at_s: float) -> None:
        """Do it; `at_s`: when what led to it was heard, which people are told."""
        self._people.tell(action, Now(self._clocks().monotonic_s, at_s))
        match action:
            case actions.AskForHosts() | actions.Evict() | actions.Release():
                self._command(action)
                self._orders.put(action)
            case actions.Gather():
                self._gathering = self._gather(action.hosts, self._clocks())
            case actions.Finish():
                self.finished = action
            case _:
                self._command(action)

    def _command(self, action: Action) -> None:
        if isinstance(action, actions.Start):
            for host in action.hosts:
                if (prepare := self._preparing.before_start(host, action.version)) is not None:
                    self._line.send(host, prepare)
        for command in commands(action, self._book.addresses, self._book.peers):
            self._line.send(command.host, command.message)

    def _watch(self, attempt: int, world_size: int) -> None:
        """Begin to watch an attempt, unless it is watched already."""
        if self.attempt is None or self.attempt.attempt != attempt:
            per_host = self.state.job.workers_per_host
            began, limits = self._clocks(), self._settings.limits
            floor_s = max(limits.floor_s, min(self.state.hangs.floor_s, MOST_WIDENED_S))
            limits = limits.model_copy(update={"floor_s": floor_s})
            self.attempt = AttemptWatch(attempt, world_size, per_host, began, self._fault_of, limits)
            self._gathering, self._told_hang_s, self._peers = None, None, None
            self._findings.begin(attempt)
