"""The driver: turns what it hears into events, and performs what `phalanx.run.decide` has decided.

Everything happens on one event loop, one thing after another: messages of executors, reports of the back end, orders of
people, and time. Nothing here decides. Heartbeats update soft state (`HostWatch`, `AttemptWatch`, `Peers`), which is
lost with this process and comes back with the next heartbeats. Only transitions become events: these are journaled, and
a driver that is started again has the same state from them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from phalanx.detect.detection import Detection
from phalanx.run import messages
from phalanx.run.backends.backend import Listener
from phalanx.run.clock import Now, read_clocks
from phalanx.run.decide import actions, events
from phalanx.run.decide.actions import Action, ranks_of
from phalanx.run.decide.events import Event, SuspectsNamed
from phalanx.run.decide.state import State, next_deadline
from phalanx.run.driver.attempt import AttemptWatch
from phalanx.run.driver.backend_orders import BackendOrders
from phalanx.run.driver.hosts import HostWatch, Preparing, commands, judged, serves_at
from phalanx.run.driver.judgements import (
    BEFORE_S,
    EvidenceGathering,
    Findings,
    LineBudget,
    Peers,
    PeersConfig,
    by_its_end,
)
from phalanx.run.driver.verdicts import JUDGED, bounded, detected_of, is_news
from phalanx.run.driver.write_ahead import Aside, Book, GroupCommit
from phalanx.run.journal import JournalError, JournalLostError
from phalanx.run.judge.step_limits import MOST_WIDENED_S, LimitConfig
from phalanx.run.logs.log_lines import share_of
from phalanx.run.messages import BadReportError, report_of
from phalanx.run.reports.webhook import Audience
from phalanx.run.wire.executor_server import ExecutorServer
from phalanx.run.wire.message_frames import KeptMessage

_log = logging.getLogger(__name__)

TICK_S = 0.1
"""Time is looked at so often, however many hosts report; when something has been decided, at once."""

_ROUNDS = 3
"""Of the loop, before time is looked at."""

NO_PROGRESS_AGAIN_S = 60.0
"""A hang is reported again if nothing was decided then."""

_JUDGE_S = 1.2
"""Of the time for evidence, what is left for judging it."""


@dataclass(frozen=True)
class WatchSettings:
    """How the driver watches."""

    heartbeat_s: float = 1.0  # how often executors report
    limits: LimitConfig = field(default_factory=LimitConfig)  # how long a job may make no step
    peers: PeersConfig = field(default_factory=PeersConfig)  # how hosts are compared; its heartbeat is that above
    # What executors prepare, by the version of the code; empty: they know.
    versions: Mapping[str, messages.Prepare] = field(default_factory=dict)


class Driver:
    """One job's.

    Args:
        book: its state.
        server: to executors.
        orders: to the back end.
        people: the audience of alerts and reports.
        classify: the class of the fault that ended a rank, by its own last lines; None: they do not show it.
        name_suspects: the judge of evidence; its last argument is a time of the events' clock.
        clocks: the time; of a job that is driven, `JobClock.read`.
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
        server: ExecutorServer,
        orders: BackendOrders,
        people: Audience,
        classify: Callable[[messages.WorkerEnded], events.Fault | None],
        name_suspects: Callable[[State, Sequence[messages.RankEvidence], float], SuspectsNamed],
        settings: WatchSettings,
        clocks: Callable[[], Now] = read_clocks,
        aside: Aside | None = None,
    ) -> None:
        self._book, self._server, self._orders, self._people = book, server, orders, people
        self._classify, self._name_suspects = classify, name_suspects
        self._settings, self._clocks = settings, clocks
        self._commits = GroupCommit(
            book, self._perform, server.acknowledge, lambda: self.on_change(), aside, self._tell_of_room
        )
        self.hosts = HostWatch(settings.heartbeat_s)
        self.attempt: AttemptWatch | None = None
        self.finished: actions.Finish | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._gathering: EvidenceGathering | None = None
        self._hang_reported_s: float | None = None
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

    def now(self) -> Now:
        """This moment, by the clock of the job."""
        return self._clocks()

    def other_versions(self) -> dict[str, int]:
        """Versions of executors, by address, that were turned away for theirs in the last minute."""
        return self._server.other_versions()

    def step_down(self, why: Exception) -> None:
        """Do nothing any more, and leave the job to the next driver."""
        self._commits.problem = why
        self._commits.end_unwritten()  # a thread that waits for room would keep this process
        self.on_change()

    def begin(self) -> None:
        """Do what has to be done at the start; an attempt that an earlier driver has begun is watched from now on."""
        if self.state.has_workers and self.state.attempt:
            self._watch(self.state.attempt, self.state.world_size)
        for action in self._book.first_actions:
            self._perform(action, self._clocks().unix_s)

    async def keep_going(self, changed: asyncio.Event) -> None:
        """Tick until the job has ended, or this driver has to.

        Args:
            changed: set by `on_change`, so that a limit that has become nearer is not slept over.
        """
        while self.finished is None and self.problem is None:
            changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self.next_tick_s(), TICK_S)):
                    await changed.wait()
            # Where this process stood still, what has come meanwhile lies in its sockets, and a loop looks at timers
            # before them: one round reads it, and another hands heartbeats on.
            for _ in range(_ROUNDS):
                await asyncio.sleep(0)
            if self.problem is None:
                with suppress(JournalError, JournalLostError):  # then there is a `problem`
                    self.tick()

    def listener(self) -> Listener:
        """What the back end shall call."""
        return Listener(self._on_host_gone, self._on_time_short)

    # From executors

    def on_hello(self, host: str, hello: messages.Hello) -> None:
        """An executor has connected, for the first time or again."""
        now = self._clocks()
        if self.hosts.is_dismissed(hello):  # it has not heard it, or not yet ended
            self._server.send(host, messages.End("this host is no part of the job any more"))
            return
        # In order with what is decided: a back end asked for one host less must not count this one as still to come.
        self._commits.then(partial(self._orders.arrived, host))
        self._book.meet(host, hello.address, now.unix_s, serves_at(hello))
        job = self.state.job
        welcome = messages.Welcome(
            messages.VERSION, job.name, self.state.attempt, self._settings.heartbeat_s, share_of(job.hosts)
        )
        self._server.send(host, welcome)
        if (prepare := self._preparing.on_hello(host, hello, self.state.version)) is not None:
            self._server.send(host, prepare)
        self._feed(self.hosts.on_hello(hello, now), host)

    def on_heartbeats(self, beats: Sequence[tuple[str, messages.Heartbeat]]) -> dict[str, str]:
        """What executors report once a second; returns hosts whose report cannot be read, and why.

        Raises:
            JournalError, JournalLostError: what follows from it could not be written down; see `on_message`.
        """
        if (problem := self.problem) is not None:
            raise problem
        now, bad = self._clocks(), dict[str, str]()
        for host, beat in beats:
            try:
                self._on_heartbeat(host, beat, now)
            except BadReportError as error:
                bad[host] = str(error)
        return bad

    def _on_heartbeat(self, host: str, beat: messages.Heartbeat, now: Now) -> None:
        # Of ten thousand hosts this is done ten thousand times a second.
        if beat.line_count and self._lines.take(beat.line_count, beat.rank, now):
            self._people.wrote([*self._lines.left_out(beat.rank), *report_of(beat).lines], now)
        if self._peers is not None:
            self._peers.on_heartbeat(host, beat, now)
        if found := self.hosts.on_heartbeat(host, beat, now):
            self._feed(found)
        # Steps themselves stay soft state. Only transitions (first step, a phase, a new limit) come back as events, so
        # that the journal grows with what happens and not with time.
        if self.attempt is not None and (found := self.attempt.on_heartbeat(beat, now)):
            self._feed(found)

    def on_message(self, host: str, message: KeptMessage) -> bool:
        """What an executor reports else.

        Returns:
            It is not written down yet; the server's `acknowledge` is called when it is.

        Raises:
            JournalError, JournalLostError: it could not be written down, and this driver has to end (`problem`).
        """
        self._feed(self._events_of(host, message, self._clocks()), host)
        return self._commits.owes(host)

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
                # By name, where the hosts that it was to test the network with serve measurements.
                check = self.state.checks.get(host)
                peers = {peer: self._book.peers.get(peer, "") for peer in (check.peers if check is not None else ())}
                return [judged(host, message, peers, self.hosts, now)]
            case messages.Prepared():
                return self._preparing.answered(host, message, self.state.version, now)
            case messages.Found():
                return self._findings.take(host, message, self._open_report, now)
            case messages.Evidence():
                self._people.heard(host, message, now)
                if self._gathering is not None:
                    self._gathering.add(host, message)
        return []

    def on_disconnected(self, host: str, why: str) -> None:
        """A connection has ended. That proves nothing about the host: it comes back, or it falls silent."""
        _log.info("the connection of %s has ended: %s", host, why)

    # From people and the back end

    def ask(self, make: Callable[[float], Event]) -> None:
        """A person's order: an event, given the time."""
        event = make(self._clocks().unix_s)
        if isinstance(event, events.StopAsked):
            self._commits.end_unwritten()
        self._feed([event])
        self._commits.settle()

    def keep(self, judge: str, found: Detection, incident: int = 0) -> None:
        """What a judge of `phalanx detect` has found, unless it is known.

        Args:
            incident: number of the report that it belongs to, which may be over; 0: none.

        Raises:
            JournalError, JournalLostError: it could not be written down; see `on_message`.
        """
        detected = events.Detected(self._clocks().unix_s, judge, bounded(found), incident)
        if is_news(self.state, detected):
            self._feed([detected])
            if self.finished is not None:
                self._commits.settle()

    def _on_host_gone(self, host: str, why: str) -> None:
        now = self._clocks()
        if self.hosts.dismiss(host):
            # It may live on where the back end has lost sight of it, as under a node's daemon that has died.
            self._server.send(host, messages.End("the back end says that this host is gone"))
        self.hosts.on_gone(host)
        self._findings.forget(host)
        self._preparing.forget(host)
        self._feed([*self._caught_up(now), events.HostGone(now.unix_s, host, why)])

    def _on_time_short(self, left_s: float) -> None:
        self._feed([events.TimeShort(self._clocks().unix_s, left_s)])

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
        gathering = self._gathering
        if gathering is not None and gathering.is_over(now):
            self._gathering = None
            # Evidence of an attempt that has ended meanwhile says nothing about the ranks of this one.
            if gathering.attempt == self.state.attempt:
                self._feed([self._name_suspects(self.state, gathering.evidence(), now.unix_s)])
        # A template that starts anew would slow down ranks beside it, or delay those that are about to start.
        state = self.state
        for host, prepare in self._preparing.renew(
            lambda host: state.has_workers and not state.has_place(host), state.version, now
        ):
            self._server.send(host, prepare)
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
        if self.attempt is not None and self._expects_steps:
            waits.append(max(self.attempt.next_look_s(now), 0.0) or self._settings.heartbeat_s)
        return max(min(waits), 0.0)

    @property
    def _expects_steps(self) -> bool:
        """Of processes that have all been started."""
        return self.state.phase == "running" or (self.state.phase == "starting" and not self.state.awaited)

    def _look_at_progress(self, now: Now) -> None:
        if self.attempt is None or not self._expects_steps:
            return
        if self._hang_reported_s is not None:
            if self.state.recovery is not None or now.monotonic_s - self._hang_reported_s < NO_PROGRESS_AGAIN_S:
                return
            self._hang_reported_s = None  # nothing came of it: nobody was heard of, or steps were made again
        # Nobody is blamed here: the event says how the ranks stand, and the judges name a suspect once stack traces and
        # flight records of the ranks have come.
        standing = self.attempt.standing(now)
        if standing.kind == "moving":
            return
        event = self.attempt.no_progress(standing, now)
        if standing.kind == "long":
            self._feed([event])
            return
        self._hang_reported_s = now.monotonic_s
        self._feed([*self._caught_up(now), event])

    def _fall_silent(self, now: Now) -> None:
        """Nothing is heard of some hosts: what their ranks wrote or evaluated then may have ended, or they have."""
        state = self.state
        places = [place for place, host in enumerate(state.placement) if self.hosts.is_unknown(host)]
        if self.attempt is None or 2 * len(places) > len(state.placement):  # it may be the driver that is cut off
            return
        self.attempt.fall_silent([r for place in places for r in ranks_of(place, state.job.workers_per_host)], now)

    def _caught_up(self, now: Now) -> list[Event]:
        """How far the attempt was, so that the report can show what is lost."""
        return self.attempt.catch_up(now) if self.attempt is not None else []

    def _look_at_peers(self, now: Now) -> None:
        """Compare the hosts of the attempt with each other, while it runs."""
        attempt, heard = self.attempt, self.hosts.hosts
        if attempt is None or self.state.phase != "running":
            return
        if self._peers is None and all(host in heard for host in self.state.placement):
            machines = {host: heard[host].hello.boot_id for host in self.state.placement}
            self._peers = Peers(attempt.attempt, machines, self._settings.peers, now)
        if self._peers is not None:
            self._feed(self._peers.look(attempt.standing(now), attempt.is_paused(now), now))

    # What is decided

    @property
    def _open_report(self) -> int:
        """Number of the incident that is open; 0: none."""
        return self.state.incident.number if self.state.incident is not None else 0

    def _feed(self, found: Sequence[Event], host: str = "") -> None:
        """Apply events in order; they are written down before what follows from them is performed.

        A driver that cannot write down what has happened must not go on: what it knows besides the journal is ahead.
        """
        if (problem := self.problem) is not None:
            raise problem
        if not found:
            return
        # The mark says up to which message of this host all is in the journal. It is written with the event, in one
        # transaction, so that after a crash a message is neither lost nor taken twice.
        mark = self._server.mark(host) if host else None
        received = {host: mark} if mark is not None else None
        for event in found:
            self._expect(self._commits.take(event, received))
            if isinstance(event, JUDGED):
                self._say(event)
        # An incident may just have been opened: what log rules reported shortly before is part of its report.
        if self._open_report:
            now = self._clocks()
            quiet_s = self.attempt.standing(now).age_s if self.attempt is not None else 0.0
            for event in self._findings.led_to(self._open_report, BEFORE_S + quiet_s, now):
                self._expect(self._commits.take(event, None))
                self._say(event)
        self._commits.put_off(host if mark is not None else "")

    def _say(self, event: Event) -> None:
        """Keep what a judge of ours has found in the shape that all judges share."""
        detected = detected_of(self.state, event)
        if detected is not None and is_news(self.state, detected):
            self._expect(self._commits.take(detected, None))

    def _expect(self, decided: Sequence[Action]) -> None:
        """What the driver itself has to know of decisions before anything else is heard."""
        # Actions are performed after the journal is on disk, events are taken before: no rank of the new attempt may be
        # heard by a driver that still watches the old one.
        for action in decided:
            if isinstance(action, actions.Start):
                self._watch(action.attempt, len(action.placement) * action.workers_per_host)
            elif isinstance(action, actions.Evict | actions.Release):
                self.hosts.dismiss(action.host)

    def _perform(self, action: Action, at_s: float) -> None:
        """Do it; `at_s`: when what led to it was heard, for people."""
        now, state = self._clocks(), self.state
        self._people.tell(action, Now(now.monotonic_s, at_s))
        match action:
            case actions.Gather():
                # Executors get less time than the phase has: a judge needs some too.
                within_s = max(state.policy.evidence_s - _JUDGE_S, state.policy.evidence_s / 2)
                for host in action.hosts:
                    self._server.send(host, messages.Gather(state.attempt, [], within_s))
                places = {host: place for place, host in enumerate(state.placement)}
                per_host = state.job.workers_per_host
                ranks = {host: ranks_of(places[host], per_host) for host in action.hosts if host in places}
                self._gathering = EvidenceGathering(state.attempt, ranks, now, within_s)
            case actions.Finish():
                self.finished = action
            case actions.Start():
                for host in action.hosts:
                    if (prepare := self._preparing.before_start(host, action.version)) is not None:
                        self._server.send(host, prepare)
        for command in commands(action, self._book.addresses, self._book.peers):
            self._server.send(command.host, command.message)
        if isinstance(action, actions.AskForHosts | actions.Evict | actions.Release):
            self._orders.put(action)

    def _tell_of_room(self, text: str) -> None:
        self._people.tell(actions.Alert("error", text), self._clocks())
        _log.warning("%s", text)

    def _watch(self, attempt: int, world_size: int) -> None:
        """Begin to watch an attempt, unless it is watched already."""
        if self.attempt is not None and self.attempt.attempt == attempt:
            return
        limits = self._settings.limits
        # A job that hung twice at the same place may just take long there: see `phalanx.run.decide.recovery`.
        floor_s = max(limits.floor_s, min(self.state.hangs.floor_s, MOST_WIDENED_S))
        limits = limits.model_copy(update={"floor_s": floor_s})
        per_host = self.state.job.workers_per_host
        self.attempt = AttemptWatch(attempt, world_size, per_host, self._clocks(), self._fault_of, limits)
        self._gathering, self._hang_reported_s, self._peers = None, None, None
        self._findings.begin(attempt)

    def _fault_of(self, ended: messages.WorkerEnded) -> events.Fault:
        host, by_rules = self.state.host_of(ended.rank) or "", self._classify(ended)
        return self._findings.fault_of(host, ended, by_rules, self._clocks()) or by_its_end(ended)
