"""Hosts that answer a driver as executors would, in simulated time; and who else a driver talks to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.run import messages
from phalanx.run.clock import Now
from phalanx.run.decide import actions
from phalanx.run.decide.events import SuspectsNamed
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import State
from phalanx.run.driver.driver import Driver, WatchSettings
from phalanx.run.driver.write_ahead import Book
from phalanx.run.journal import Journal, open_journal
from phalanx.run.messages import heartbeat
from phalanx.run.wire.message_frames import ReceivedMark

STEP_S = 1.0
ALL_GOOD = [messages.CheckOutcome("memory", "pass")]


@dataclass
class FakeHost:
    """An executor.

    Attributes:
        is_mute: neither hears nor says anything; its ranks go on.
        stalled: its ranks make no step, and nothing of them moves.
        moves: though they make no step, something does.
        stopped_s: for how long they have been stopped.
        boot: its machine.
        saved: steps that were done before this attempt; with `is_absolute` they are counted.
        busy_s: own time per step; negative: it is not reported.
        sent_bytes: of its training interface; None: it has none.
        phase, expects_s: what its ranks say that they are in, and for how long.
        address: as other hosts reach it.
        peer_port: where it serves measurements of the network; 0: it does not.
        check: what its checks find; asked again, it answers the same.
    """

    name: str
    attempt: int = 0
    ranks: list[int] = field(default_factory=list)
    began_s: float = 0.0
    steps: int = 0
    is_mute: bool = False
    stalled: bool = False
    moves: bool = False
    stopped_s: float = 0.0
    sequence: int = 0
    pid: int = 1
    boot: str = "boot"
    saved: int = 0
    is_absolute: bool = False
    busy_s: float = -1.0
    sent_bytes: int | None = None
    phase: str = ""
    expects_s: float = 0.0
    heard: list[messages.FromDriver] = field(default_factory=list)
    address: str = ""
    peer_port: int = 0
    answers: dict[int, messages.Checked] = field(default_factory=dict)
    check: Callable[[messages.Check], list[messages.CheckOutcome]] = lambda order: ALL_GOOD

    def hello(self) -> messages.Hello:
        address, mine = self.address or f"at-{self.name}", (self.boot, self.pid, self.attempt, self.ranks)
        return messages.Hello(1, self.name, address, 2, 0, [], "", *mine, self.peer_port)

    def answer(self, message: messages.FromDriver, now_s: float) -> list[messages.FromExecutor]:
        self.heard.append(message)
        match message:
            case messages.OpenStore():
                return [messages.StoreOpened(message.attempt, 2950)]
            case messages.Start():
                self.attempt, self.ranks, self.began_s, self.steps = message.attempt, message.ranks, now_s, 0
                return [messages.Started(message.attempt, {rank: 100 + rank for rank in message.ranks})]
            case messages.Stop():
                self.ranks, self.stalled, self.stopped_s = [], False, 0.0
                return [messages.Stopped(message.attempt, 0.1)]
            case messages.Check():
                if message.number not in self.answers:
                    self.answers[message.number] = messages.Checked(message.number, self.check(message))
                return [self.answers[message.number]]
            case messages.Gather():
                looks = [messages.RankEvidence(rank, "wait (train.py)", step=self.steps) for rank in self.ranks]
                return [messages.Evidence(message.attempt, looks)]
        return []

    def beat(self, now_s: float) -> messages.Heartbeat:
        if not self.stalled:
            self.steps = int((now_s - self.began_s) / STEP_S)
        age_s = now_s - self.began_s - self.steps * STEP_S
        workers = [
            messages.WorkerState(
                rank,
                100 + rank,
                "running",
                self.saved + self.steps,
                age_s,
                STEP_S,
                self.phase,
                age_s,
                self.expects_s,
                busy_s=self.busy_s,
                steps_here=self.steps,
                is_absolute=self.is_absolute,
                still_s=0.0 if self.moves else age_s if age_s > 5 else -1.0,
                stopped_s=self.stopped_s,
            )
            for rank in self.ranks
        ]
        self.sequence += 1
        carried_bytes = -1 if self.sent_bytes is None else 2 * self.sent_bytes
        state = messages.HostState(0.0, 0, 0, 0)
        return heartbeat(self.sequence, now_s, self.attempt, workers, state, [], carried_bytes=carried_bytes)


class Town:
    """A driver and its hosts.

    Attributes:
        told: what people were told: alerts, and what is about incidents.
        explained: what executors have said that may explain a fault, with their hosts.
        orders: what the back end was told.
    """

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[str],
        job: Job,
        policy: Policy | None = None,
        settings: WatchSettings | None = None,
    ) -> None:
        self.path = str(folder / "journal.db")
        self.hosts = {name: FakeHost(name) for name in hosts}
        self.job, self.policy, self.settings = job, policy or Policy(), settings or WatchSettings()
        self.now_s = 1000.0
        self.told: list[actions.Action] = []
        self.explained: list[tuple[str, messages.Evidence | messages.WorkerEnded]] = []
        self.lines: list[messages.LogLine] = []
        self.orders: list[actions.Action] = []
        self.here: list[str] = []
        self.inbox: list[tuple[str, messages.FromExecutor]] = []
        self.journal: Journal = open_journal(self.path)
        self.driver = self._make()

    # what the driver talks to

    def send(self, host: str, message: messages.FromDriver) -> bool:
        there = self.hosts[host]
        if there.is_mute:
            return False
        self.inbox += [(host, answer) for answer in there.answer(message, self.now_s)]
        return True

    def mark(self, host: str) -> ReceivedMark | None:
        return None

    def acknowledge(self, host: str) -> None:
        pass

    def other_versions(self) -> dict[str, int]:
        return {}

    def arrived(self, host: str) -> None:
        self.here.append(host)

    def put(self, action: actions.AskForHosts | actions.Evict | actions.Release) -> None:
        self.orders.append(action)

    def tell(self, action: actions.Action, at: Now) -> None:
        if isinstance(action, actions.Alert | actions.OpenIncident | actions.AddToIncident | actions.CloseIncident):
            self.told.append(action)

    def heard(self, host: str, message: messages.Evidence | messages.WorkerEnded, at: Now) -> None:
        self.explained.append((host, message))

    def wrote(self, lines: Sequence[messages.LogLine], at: Now) -> None:
        self.lines.extend(lines)

    # what happens

    def begin(self) -> None:
        self.driver.begin()
        for name in self.hosts:
            self.connect(name)

    def connect(self, name: str) -> None:
        self.driver.on_hello(name, self.hosts[name].hello())
        self.deliver()

    def restart(self) -> None:
        """The driver is killed, and another one begins on the same journal."""
        self.journal.close()
        self.journal = open_journal(self.path)
        self.driver = self._make()
        self.begin()

    def say(self, host: str, message: messages.FromExecutor) -> None:
        if isinstance(message, messages.Heartbeat):
            self.driver.on_heartbeats([(host, message)])
        else:
            self.driver.on_message(host, message)
        self.deliver()

    def deliver(self) -> None:
        while self.inbox:
            self.driver.on_message(*self.inbox.pop(0))

    def go_on(self, seconds: float) -> None:
        """Heartbeats every second, and ticks when they are wanted."""
        end_s = self.now_s + seconds
        next_beat_s = self.now_s
        while self.now_s < end_s:
            if self.now_s >= next_beat_s:
                self._beat()
                next_beat_s += 1.0
            self.driver.tick()
            self.deliver()
            self.now_s += min(max(self.driver.next_tick_s(), 0.001), next_beat_s - self.now_s, end_s - self.now_s)

    def until(self, condition: Callable[[State], bool], within_s: float = 600.0) -> None:
        end_s = self.now_s + within_s
        while not condition(self.driver.state):
            assert self.now_s < end_s, self.driver.state
            self.go_on(0.25)

    def sent(self, kind: type) -> list[tuple[str, messages.FromDriver]]:
        return [(host.name, one) for host in self.hosts.values() for one in host.heard if isinstance(one, kind)]

    def _beat(self) -> None:
        for host in self.hosts.values():
            if not host.is_mute:
                self.driver.on_heartbeats([(host.name, host.beat(self.now_s))])
                self.deliver()

    def _clocks(self) -> Now:
        return Now(self.now_s, 1e9 + self.now_s)

    def _make(self) -> Driver:
        book = Book(self.journal, self.job, self.policy, self._clocks().unix_s)
        return Driver(book, self, self, self, lambda ended: None, blame_the_silent, self.settings, self._clocks)


def blame_the_silent(state: State, evidence: Sequence[messages.RankEvidence], at_s: float) -> SuspectsNamed:
    silent = tuple(one.rank for one in evidence if one.is_silent)
    return SuspectsNamed(at_s, state.attempt, silent, "no answer" if silent else "")


def running(attempt: int) -> Callable[[State], bool]:
    return lambda state: state.phase == "running" and state.attempt == attempt
