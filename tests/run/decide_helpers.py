"""An emulated world of hosts that does what `decide` orders and answers as executors, judge and back end would.

Time is simulated: nothing sleeps. The world checks on the way that no action belongs to a lower attempt than one
before, that attempts rise, that no host has ranks of two, and that an evicted host gets none.

    world = World(Job(name="j", hosts=4, spares=1), hosts=5)
    world.run_until(running)
    world.kill(3)
    world.run_until(running)
    assert world.taken("Evict") == []
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.run.decide import actions as act
from phalanx.run.decide import events as ev
from phalanx.run.decide.decide import decide, replay
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import State, initial, next_deadline

NETWORK_S = 0.001


@dataclass
class SimHost:
    """A host, and what is wrong with it.

    Attributes:
        ranks: that run there, of `attempt`.
        fails_checks: why its checks do not pass; empty: they do.
        link: why no peer can be measured from there, nor it from them; empty: they can.
        rate: bytes per second of its link.
        is_cut: its executor cannot reach the driver, nor can it be reached; its workers go on.
        hung: ranks that stand still.
        mute: messages that it never answers, by name of the action.
        unheard: ends of ranks that the driver could not hear of yet.
    """

    name: str
    rack: str = ""
    is_alive: bool = True
    is_cut: bool = False
    attempt: int = 0
    ranks: list[int] = field(default_factory=list)
    hung: set[int] = field(default_factory=set)
    fails_checks: str = ""
    link: str = ""
    rate: float = 10e9
    fails_start: str = ""
    fails_store: str = ""
    stuck: tuple[int, ...] = ()
    mute: set[str] = field(default_factory=set)
    unheard: list[ev.WorkerFailed] = field(default_factory=list)


@dataclass
class Speeds:
    """How long things take there, in seconds."""

    store: float = 0.01
    start: float = 0.2
    first_step: float = 0.1
    step: float = 0.05
    stop: float = 0.1
    check: dict[str, float] = field(default_factory=lambda: {"passive": 0.05, "quick": 3.0, "full": 60.0})
    evidence: float = 1.0
    hang_limit: float = 5.0
    unknown_after: float = 5.0
    provision: float = 30.0
    report: float = 1.0


class World:
    """Hosts, their back end, and a driver whose only part is `decide`.

    Args:
        hosts: how many join at once, named a, b, c …; or their names.
        racks: of hosts, by name.
        pool: further hosts that the back end can bring.
        resumes_every: steps between checkpoints; 0: an attempt begins at step 0 again.
        names_suspects: whether the judge of the evidence finds who hangs.
        says_restored: a library that writes its checkpoints says of which step the state was that it has restored.
    """

    def __init__(
        self,
        job: Job,
        policy: Policy | None = None,
        *,
        hosts: int | list[str] | None = None,
        racks: dict[str, str] | None = None,
        pool: list[str] | None = None,
        speeds: Speeds | None = None,
        resumes_every: int = 1,
        names_suspects: bool = True,
        is_absolute: bool = True,
        says_restored: bool = False,
    ) -> None:
        self.job, self.policy, self.speeds = job, policy or Policy(), speeds or Speeds()
        self.state: State = initial(self.policy, job)
        self.now_s = 0.0
        self.journal: list[ev.Event] = []
        self.log: list[tuple[float, act.Action]] = []
        self.pool = list(pool or [])
        self.racks = racks or {}
        self.imported_s = -1.0
        self.resumes_every, self.names_suspects, self.is_absolute = resumes_every, names_suspects, is_absolute
        self.says_restored = says_restored
        self.saved_step = 0
        self.base_step = 0
        self.running_since_s: float | None = None
        self.on_attempt: Callable[[World, int], None] = lambda world, attempt: None
        self.has_driver = True
        self.decide_calls = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._asked = 0
        self._store_port = 29500
        self._placements: dict[int, tuple[str, ...]] = {}
        count = hosts if hosts is not None else job.hosts + job.spares
        names = count if isinstance(count, list) else host_names(count)
        self.hosts = {name: SimHost(name, self.racks.get(name, "")) for name in names}
        self.at(0.0, lambda: self.deliver(ev.JobBegun(self.now_s)))
        for name in names:
            self.at(0.01, lambda name=name: self._join(self.hosts[name]))

    # Time

    def at(self, in_s: float, do: Callable[[], None]) -> None:
        """Do something so many seconds from now."""
        heapq.heappush(self._queue, (self.now_s + in_s, next(self._order), do))

    def run_until(self, condition: Callable[[World], bool], within_s: float = 3600.0) -> None:
        """Let time pass until the condition holds; fails if it does not in time."""
        end_s = self.now_s + within_s
        while not condition(self):
            assert self.advance(end_s), f"not within {within_s} s: phase {self.state.phase}, {self.states()}"

    def run_for(self, seconds: float) -> None:
        """Let so much time pass."""
        end_s = self.now_s + seconds
        while self.advance(end_s):
            pass
        self.now_s = end_s

    def advance(self, end_s: float) -> bool:
        """Do what comes next, if it comes before the end; else False."""
        due_s = next_deadline(self.state) if self.has_driver else None
        queued_s = self._queue[0][0] if self._queue else None
        times = [time_s for time_s in (due_s, queued_s) if time_s is not None]
        if not times or min(times) > end_s:
            return False
        self.now_s = max(self.now_s, min(times))
        if queued_s is not None and (due_s is None or queued_s <= due_s):
            heapq.heappop(self._queue)[2]()
        else:
            self.deliver(ev.Tick(self.now_s))
        return True

    # The driver

    def deliver(self, event: ev.Event) -> None:
        """Give the driver an event, and perform what it decides."""
        if not self.has_driver:
            return
        before = self.state
        self.journal.append(event)
        self.state, actions = decide(before, event)
        self.decide_calls += 1
        assert self.state.attempt >= before.attempt
        for action in actions:
            self._check_order(action)
            self.log.append((self.now_s, action))
            self._perform(action)

    def _check_order(self, action: act.Action) -> None:
        attempt = getattr(action, "attempt", None)
        if isinstance(action, act.OpenStore | act.Start | act.Gather | act.Stop):
            # What an idle host has left of an attempt that the journal does not know has a higher number.
            left = {h.attempt for h in self.hosts.values() if isinstance(action, act.Stop) and h.name in action.hosts}
            assert attempt in {self.state.attempt, *(n for n in left if n > self.state.attempt)}, f"{action}"
        if isinstance(action, act.Start):
            banned = {name for name, host in self.state.hosts.items() if host.state == "evicted"}
            assert not banned & set(action.placement)
            assert len(set(action.placement)) == len(action.placement)

    def stop_driver(self) -> None:
        """The driver is killed: nothing is heard or decided; what its executors do goes on."""
        self.has_driver = False

    def restart_driver(self) -> None:
        """A new driver reads the journal, and executors connect again."""
        again = replay(self.policy, self.job, self.journal)
        assert again == self.state, "the journal does not give the state that was lost"
        self.state, self.has_driver = again, True
        self.deliver(ev.DriverRestarted(self.now_s))
        for host in self.hosts.values():
            self.at(0.0005, lambda host=host: self._join(host))  # before anything else is heard of it

    def taken(self, *kinds: str) -> list[act.Action]:
        """Actions of these kinds so far."""
        return [action for _, action in self.log if not kinds or type(action).__name__ in kinds]

    def kinds(self, since: int = 0) -> list[str]:
        """Names of the actions so far."""
        return [type(action).__name__ for _, action in self.log[since:]]

    def story(self) -> str:
        """What the incident reports say."""
        lines = [
            f"{getattr(a, 'text', '')}: {getattr(a, 'why', '')}"
            for _, a in self.log
            if isinstance(a, act.OpenIncident | act.AddToIncident | act.CloseIncident)
        ]
        return "\n".join(lines)

    def states(self) -> dict[str, str]:
        """State of every host that the driver knows."""
        return {name: host.state for name, host in self.state.hosts.items()}

    # Steps

    @property
    def step(self) -> int:
        """Steps of the training that are done."""
        if self.running_since_s is None:
            return self.base_step
        return self.base_step + 1 + int((self.now_s - self.running_since_s) / self.speeds.step)

    def _freeze(self) -> None:
        """No rank goes on: some are dead or hang."""
        self.base_step, self.running_since_s = self.step, None
        self.saved_step = self.base_step // self.resumes_every * self.resumes_every if self.resumes_every else 0

    def _make_steps(self, attempt: int) -> None:
        if not self.has_driver:  # heartbeats say it again once there is a driver
            self.at(0.5, lambda: self._make_steps(attempt))
            return
        placement = [self.hosts[name] for name in self.state.placement]
        whole = all(h.is_alive and h.attempt == attempt and h.ranks and not h.hung for h in placement)
        if not whole or attempt != self.state.attempt:
            self._notice_hang(attempt)
            return
        self.base_step = self.saved_step
        self.running_since_s = self.now_s
        if self.says_restored:
            self.deliver(ev.Restored(self.now_s, attempt, self.saved_step))
        self.deliver(ev.Running(self.now_s, attempt, self._said_step(), self.is_absolute, self.imported_s))
        self.on_attempt(self, attempt)
        self._report(attempt)

    def _said_step(self) -> int:
        return self.step if self.is_absolute else self.step - self.saved_step

    def _report(self, attempt: int) -> None:
        if attempt == self.state.attempt and self.running_since_s is not None:
            self.deliver(ev.Advanced(self.now_s, attempt, self._said_step(), self.is_absolute))
            self.at(self.speeds.report, lambda: self._report(attempt))

    # What people see happen to hosts and ranks

    def kill(self, rank: int, name: str = "SIGKILL", fault: ev.Fault = "process") -> None:
        """A rank is killed by a signal; the others of the job follow."""
        self._fail([rank], "signal", f"killed by {name}", fault)

    def throw(self, ranks: list[int], summary: str = "ValueError: wrong", kind: ev.FailureKind = "raised") -> None:
        """Ranks raise an exception, or leave with a status; the others follow."""
        self._fail(ranks, kind, summary, "user" if kind in ("raised", "user") else "process")

    def refuse(self, rank: int, summary: str) -> None:
        """A rank leaves with exit status 2 before it has connected to any other, so that none follows."""
        self._freeze()
        failed = ev.WorkerFailed(0, self.state.attempt, rank, "usage", "process", summary, False, -1)
        self._rank_ends(rank, self.state.attempt, failed)

    def _fail(self, ranks: list[int], kind: ev.FailureKind, summary: str, fault: ev.Fault) -> None:
        self._freeze()
        attempt, step = self.state.attempt, self._said_step()
        for rank in ranks:
            self._rank_ends(rank, attempt, ev.WorkerFailed(0, attempt, rank, kind, fault, summary, False, step))
        for rank in range(self.state.world_size):
            if rank not in ranks:
                followed = ev.WorkerFailed(
                    0, attempt, rank, "raised", "network", "Connection closed by peer", True, step
                )
                self.at(0.05, lambda rank=rank, event=followed: self._rank_ends(rank, attempt, event))

    def _rank_ends(self, rank: int, attempt: int, event: ev.WorkerFailed) -> None:
        placement = self._placements.get(attempt, ())
        host = self.hosts[placement[rank // self.job.workers_per_host]] if placement else None
        if host is None or host.attempt != attempt or rank not in host.ranks or rank in host.hung:
            return
        host.ranks.remove(rank)

        def tell() -> None:
            if not host.is_alive:
                return
            if self.has_driver and not host.is_cut:
                self.deliver(_at(event, self.now_s))
            else:  # an executor keeps the ends of ranks until the driver has heard them
                host.unheard.append(event)

        self.at(0.01 + NETWORK_S, tell)

    def hang(self, rank: int) -> None:
        """A rank stands still, and with it all others."""
        host = self.hosts[self.state.placement[rank // self.job.workers_per_host]]
        host.hung.add(rank)
        self._freeze()
        self._notice_hang(self.state.attempt)

    def _notice_hang(self, attempt: int) -> None:
        limit = self.speeds.hang_limit

        def notice() -> None:
            if self.has_driver:
                self.deliver(ev.NoProgress(self.now_s, attempt, limit, limit))
            else:
                self._notice_hang(attempt)

        self.at(limit, notice)

    def lose_host(self, name: str, says_why: str = "power") -> None:
        """A host is gone, with all that ran there; the back end says so (or, without words, does not)."""
        host = self.hosts[name]
        had_ranks = bool(host.ranks) and host.attempt == self.state.attempt
        host.is_alive, host.ranks, host.hung = False, [], set()
        if had_ranks:
            self._freeze()
            self._others_follow(host)
        if says_why:
            self.at(0.5, lambda: self.deliver(ev.HostGone(self.now_s, name, says_why)))
        self.at(self.speeds.unknown_after, lambda: self.deliver(ev.HostUnknown(self.now_s, name)))

    def _others_follow(self, lost: SimHost) -> None:
        attempt = self.state.attempt
        for rank in range(self.state.world_size):
            event = ev.WorkerFailed(0, attempt, rank, "raised", "network", "Connection reset by peer", True, -1)
            self.at(0.05, lambda rank=rank, event=event: self._rank_ends(rank, attempt, event))

    def cut(self, name: str) -> None:
        """The driver and a host do not hear each other any more; its workers go on."""
        self.hosts[name].is_cut = True
        self.at(self.speeds.unknown_after, lambda: self.deliver(ev.HostUnknown(self.now_s, name)))

    def reconnect(self, name: str) -> None:
        """They do again."""
        self.hosts[name].is_cut = False
        self._join(self.hosts[name])

    def bring(self, name: str, rack: str = "") -> None:
        """A host joins, for the first time or after it was lost."""
        self.hosts[name] = SimHost(name, rack or self.racks.get(name, ""))
        self._join(self.hosts[name])

    def finish_work(self) -> None:
        """Every rank returns."""
        for host in self.hosts.values():
            host.ranks = []
        self.deliver(ev.WorkersReturned(self.now_s, self.state.attempt))

    def _join(self, host: SimHost) -> None:
        if host.is_alive and not host.is_cut:
            running = tuple(host.ranks)
            self.deliver(ev.HostJoined(self.now_s, host.name, host.rack, host.attempt, running))
            unheard, host.unheard = host.unheard, []
            for event in unheard:
                self.deliver(_at(event, self.now_s))

    # What executors and the back end do when told

    def _perform(self, action: act.Action) -> None:
        handler = getattr(self, f"_on_{type(action).__name__}", None)
        if handler is not None:
            handler(action)

    def _answer(self, host: SimHost, after_s: float, event: Callable[[float], ev.Event]) -> None:
        def send() -> None:
            if host.is_alive and not host.is_cut and self.hosts.get(host.name) is host:
                self.deliver(event(self.now_s))

        self.at(after_s + NETWORK_S, send)

    def _hearing(self, name: str, what: str) -> SimHost | None:
        host = self.hosts.get(name)
        return host if host and host.is_alive and not host.is_cut and what not in host.mute else None

    def _on_OpenStore(self, action: act.OpenStore) -> None:  # noqa: N802 - named after the action
        host = self._hearing(action.host, "OpenStore")
        if host is None:
            return
        if host.fails_store:
            self._answer(host, 0.01, lambda now: ev.StoreFailed(now, action.attempt, host.fails_store))
        else:
            self._answer(host, self.speeds.store, lambda now: ev.StoreOpened(now, action.attempt, self._store_port))

    def _on_Start(self, action: act.Start) -> None:  # noqa: N802
        self._placements[action.attempt] = action.placement
        for name in action.hosts:
            host = self._hearing(name, "Start")
            if host is not None:
                self._start(host, action)
        if len(action.hosts) == len(action.placement):
            self.at(self.speeds.start + self.speeds.first_step, lambda: self._make_steps(action.attempt))

    def _start(self, host: SimHost, action: act.Start) -> None:
        if host.fails_start:
            self._answer(host, 0.01, lambda now: ev.StartFailed(now, action.attempt, host.name, host.fails_start))
            return
        assert action.attempt >= host.attempt
        if host.attempt < action.attempt:
            assert not host.ranks, f"{host.name} still has ranks of attempt {host.attempt}"
            place = action.placement.index(host.name)
            host.attempt, host.ranks = action.attempt, list(act.ranks_of(place, action.workers_per_host))
        self._answer(host, self.speeds.start, lambda now: ev.Started(now, action.attempt, host.name))

    def _on_Stop(self, action: act.Stop) -> None:  # noqa: N802
        for name in action.hosts:
            host = self._hearing(name, "Stop")
            if host is not None and host.attempt <= action.attempt:  # else its executor refuses
                self._end_ranks(host)
                stuck = host.stuck
                self._answer(
                    host, self.speeds.stop, lambda now, h=host, s=stuck: ev.Stopped(now, action.attempt, h.name, s)
                )

    def _end_ranks(self, host: SimHost) -> None:
        if self.running_since_s is not None and host.ranks and host.attempt == self.state.attempt:
            self._freeze()
        host.ranks, host.hung = [], set()

    def _on_Gather(self, action: act.Gather) -> None:  # noqa: N802
        hung = tuple(sorted(rank for host in self.hosts.values() for rank in host.hung))
        named = hung if self.names_suspects else ()
        self.at(
            self.speeds.evidence,
            lambda: self.deliver(ev.SuspectsNamed(self.now_s, action.attempt, named, "it did not answer")),
        )

    def _on_Check(self, action: act.Check) -> None:  # noqa: N802
        host = self._hearing(action.host, "Check")
        if host is not None:
            seconds = self.speeds.check[action.kind]
            self._answer(host, seconds, lambda now: self._checked(host, action, now))

    def _checked(self, host: SimHost, action: act.Check, now_s: float) -> ev.Event:
        if action.kind == "passive":
            return ev.CheckPassed(now_s, host.name, action.number)
        ways = {peer: self._way(host, peer) for peer in action.peers}
        bad = {peer: why for peer, (why, _) in ways.items() if why}
        rates = {peer: rate for peer, (why, rate) in ways.items() if not why}
        if host.fails_checks or bad:
            why = "; ".join(filter(None, [host.fails_checks, *(f"peers: {peer}: {why}" for peer, why in bad.items())]))
            return ev.CheckFailed(now_s, host.name, action.number, why, bad, rates, not host.fails_checks)
        return ev.CheckPassed(now_s, host.name, action.number, bad, rates)

    def _way(self, host: SimHost, peer: str) -> tuple[str, float]:
        """What is bad between two hosts, and how fast it is."""
        other = self.hosts[peer]
        return host.link or other.link or ("" if other.is_alive else "timed out"), min(host.rate, other.rate)

    def _on_Evict(self, action: act.Evict) -> None:  # noqa: N802
        self._take_away(action.host)

    def _on_Release(self, action: act.Release) -> None:  # noqa: N802
        self._take_away(action.host)

    def _take_away(self, name: str) -> None:
        host = self.hosts.get(name)
        if host is not None:
            self._end_ranks(host)
            host.is_alive = False

    def _on_AskForHosts(self, action: act.AskForHosts) -> None:  # noqa: N802
        self._asked = action.count
        for _ in range(min(action.count, len(self.pool))):
            self.at(self.speeds.provision, self._bring_one)

    def _bring_one(self) -> None:
        if self.pool and self.state.asked > 0:
            self.bring(self.pool.pop(0))

    def _on_Finish(self, action: act.Finish) -> None:  # noqa: N802
        for host in self.hosts.values():
            self._end_ranks(host)


def running(world: World) -> bool:
    """The job makes steps."""
    return world.state.phase == "running"


def ended(world: World) -> bool:
    """It is over."""
    return world.state.phase == "ended"


def attempt_runs(number: int) -> Callable[[World], bool]:
    """This attempt makes steps."""
    return lambda world: world.state.phase == "running" and world.state.attempt == number


def host_names(count: int) -> list[str]:
    """a, b, c … for few; node0000 … for many."""
    return [chr(97 + i) for i in range(count)] if count <= 26 else [f"node{i:04}" for i in range(count)]


def _at(event: ev.WorkerFailed, now_s: float) -> ev.WorkerFailed:
    return ev.WorkerFailed(
        now_s, event.attempt, event.rank, event.kind, event.fault, event.summary, event.follows, event.step
    )
