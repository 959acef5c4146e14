"""A cluster in simulated time: nodes that fail and are repaired, executors and a back end that answer `decide`.

Nothing sleeps. Steps are not made one by one: how many there are follows from how long all ranks went on.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx.run.decide import actions as act
from phalanx.run.decide import events as ev
from phalanx.run.decide.decide import decide
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import State, initial, next_deadline

from .trace import Effect, Fault


@dataclass(frozen=True)
class Pace:
    """How long things take there, in seconds; assumptions but for what the driver decides.

    Attributes:
        step: with all hosts of the job.
        saved_every: seconds of training between checkpoints, which are what is gone back to.
        first_step: from the start of the processes, which are forked, to the first new step: connections, the
            checkpoint, warming up.
        hang: from the last step until it is clear that there will be none.
        provision: until a node that is asked for has joined.
        noticed: until the back end says that a host is gone.
        slowed: how many times as long steps take with a slow host.
        slow_found: until its own times give it away.
        operator: until somebody begins the job again, should it end.
    """

    step: float = 10.0
    saved_every: float = 300.0
    first_step: float = 60.0
    start: float = 0.5
    stop: float = 2.0
    hang: float = 35.0
    evidence: float = 2.0
    provision: float = 900.0
    noticed: float = 5.0
    slowed: float = 1.3
    slow_found: float = 1000.0
    operator: float = 1800.0
    checks: dict[str, float] = field(default_factory=lambda: {"passive": 0.1, "quick": 5.0, "full": 300.0})


@dataclass
class Node:
    """A machine; `host` is its name in the job, which changes when it comes back; empty: it is not in it."""

    name: str
    host: str = ""
    faults: list[Fault] = field(default_factory=list)

    @property
    def effects(self) -> set[Effect]:
        return {fault.effect for fault in self.faults}


@dataclass
class Tally:
    """What became of the time.

    Attributes:
        work_s: training that counts, as seconds with all hosts.
        lost_s: training that was made again.
        waited_s: without enough hosts.
        wrong: evictions of nodes that had no fault.
    """

    work_s: float = 0.0
    lost_s: float = 0.0
    waited_s: float = 0.0
    recoveries: int = 0
    evictions: int = 0
    wrong: int = 0
    endings: list[str] = field(default_factory=list)
    decisions: int = 0


class Cluster:
    """One job on a cluster, and its driver's decisions.

    Args:
        nodes: names of all machines.
        faults: that they will have.
        seed: which of them begin in the job.
    """

    def __init__(
        self, job: Job, policy: Policy, nodes: Sequence[str], faults: Sequence[Fault], seed: int, pace: Pace
    ) -> None:
        self.job, self.policy, self.pace = job, policy, pace
        self.tally = Tally()
        self.now_s = 0.0
        self.random = random.Random(seed)
        self.nodes = {name: Node(name) for name in nodes}
        self._by_host: dict[str, Node] = {}
        self._names = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._coming: list[Node] = []
        self._asked = 0
        self._going_since_s: float | None = None
        self._unsaved_s = 0.0
        self._waiting_since_s: float | None = 0.0
        for fault in faults:
            self._at(fault.begins_s, lambda fault=fault: self._begins(fault))
            self._at(fault.ends_s, lambda fault=fault: self._ends(fault))
        self._begin()

    # Time

    def run(self, until_s: float) -> Tally:
        """Let time pass until then; what became of it."""
        while True:
            due_s = next_deadline(self.state)
            queued_s = self._queue[0][0] if self._queue else math.inf
            at_s = queued_s if due_s is None else min(queued_s, max(due_s, self.now_s))
            if at_s > until_s:
                break
            self.now_s = max(self.now_s, at_s)
            if queued_s <= self.now_s:
                heapq.heappop(self._queue)[2]()
            else:
                self._tell(ev.Tick(self.now_s))
        self.now_s = until_s
        self._pause()
        self._waits(False)
        return self.tally

    def _at(self, at_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at_s, next(self._order), do))

    def _after(self, seconds: float, host: str, make: Callable[[float], ev.Event]) -> None:
        """An answer of a host, if it is still there by then."""

        def say() -> None:
            node = self._by_host.get(host)
            if node is not None and "dies" not in node.effects:
                self._tell(make(self.now_s))

        self._at(self.now_s + seconds, say)

    # The job

    def _begin(self) -> None:
        self.state: State = initial(self.policy, self.job)
        self._tell(ev.JobBegun(self.now_s))
        free = [node for node in self.nodes.values() if not node.faults]
        for node in self.random.sample(free, min(len(free), self.job.hosts + self.job.spares)):
            self._join(node)

    def _tell(self, event: ev.Event) -> None:
        before = self.state
        self.state, actions = decide(before, event)
        self.tally.decisions += 1
        self._waits(self.state.phase == "waiting")
        for action in actions:
            handler = getattr(self, f"_on_{type(action).__name__.lower()}", None)
            if handler is not None:
                handler(action)

    def _waits(self, is_waiting: bool) -> None:
        if is_waiting and self._waiting_since_s is None:
            self._waiting_since_s = self.now_s
        elif not is_waiting and self._waiting_since_s is not None:
            self.tally.waited_s += self.now_s - self._waiting_since_s
            self._waiting_since_s = None

    # Training

    @property
    def _speed(self) -> float:
        """Of the whole job on all its hosts, healthy: 1."""
        placed = [self._by_host[host] for host in self.state.placement if host in self._by_host]
        slowed = self.pace.slowed if any("slow" in node.effects for node in placed) else 1.0
        return len(self.state.placement) / self.job.hosts / slowed

    def _pause(self) -> None:
        """Count the training until now; no step is made from now on."""
        if self._going_since_s is not None:
            self._unsaved_s += (self.now_s - self._going_since_s) * self._rate
            saved_s = self._unsaved_s // self.pace.saved_every * self.pace.saved_every
            self.tally.work_s += saved_s
            self._unsaved_s -= saved_s
            self._going_since_s = None

    def _go(self) -> None:
        self._going_since_s, self._rate = self.now_s, self._speed

    def _go_on(self) -> None:
        """Steps may take longer or shorter from now on."""
        if self._is_going:
            self._pause()
            self._go()

    def _stand(self) -> None:
        """Ranks are gone or stand still: what was not saved is lost."""
        self._pause()
        if self._step > self._told_step:
            self._told_step = self._step
            self._tell(ev.Advanced(self.now_s, self.state.attempt, self._step, is_absolute=True))
        self.tally.lost_s += self._unsaved_s
        self._unsaved_s = 0.0

    _told_step = -1

    @property
    def _step(self) -> int:
        return int((self.tally.work_s + self._unsaved_s) / self.pace.step)

    @property
    def _is_going(self) -> bool:
        return self._going_since_s is not None

    def _first_step(self, attempt: int) -> None:
        if attempt != self.state.attempt or self.state.phase != "starting":
            return
        placed = [(host, self._by_host.get(host)) for host in self.state.placement]
        bad = [host for host, node in placed if node is None or node.effects & {"dies", "fails"}]
        if bad:
            self._rank_fails(bad[0], attempt)
        elif any("hangs" in node.effects for _, node in placed if node is not None):
            self._hangs(attempt)
        else:
            self._told_step = max(self._told_step, self._step)
            self._tell(ev.Running(self.now_s, attempt, self._step + 1, is_absolute=True))
            self._go()
            for host, node in placed:
                if node is not None and "slow" in node.effects:
                    self._find_slow(host)

    # Faults

    def _begins(self, fault: Fault) -> None:
        node = self.nodes[fault.node]
        node.faults.append(fault)
        if node in self._coming:
            self._coming.remove(node)
            self._provide()
        if node.host:
            self._strikes(node, fault.effect)

    def _strikes(self, node: Node, effect: Effect) -> None:
        host, attempt = node.host, self.state.attempt
        takes_part = host in self.state.placement and self.state.has_workers
        if effect == "taken out":
            self._tell(ev.DrainAsked(self.now_s, host, "operator"))
        elif effect == "slow" and takes_part:
            self._go_on()
            self._find_slow(host)
        elif effect == "dies":
            self._stand_if(takes_part)
            self._at(self.now_s + self.pace.noticed, lambda: self._gone(node, host))
        elif effect in ("fails", "hangs") and takes_part and self.state.phase == "running":
            self._stand_if(True)
            self._rank_fails(host, attempt) if effect == "fails" else self._hangs(attempt)

    def _find_slow(self, host: str) -> None:
        """Its own times give it away, if the attempt goes on for so long."""
        attempt, ratio = self.state.attempt, self.pace.slowed

        def say(now_s: float) -> ev.Event:
            node = self._by_host[host]
            return ev.SlowHost(now_s, attempt if "slow" in node.effects else -1, host, ratio)

        self._after(self.pace.slow_found, host, say)

    def _stand_if(self, does: bool) -> None:
        if does and self.state.phase == "running":
            self._stand()

    def _rank_fails(self, host: str, attempt: int) -> None:
        rank = self.state.place_of(host) * self.job.workers_per_host
        text = "NVRM: Xid 79, GPU has fallen off the bus"
        self._tell(ev.Noticed(self.now_s, host, "xid-lost", text, fault="host", is_fatal=True))
        words = "RuntimeError: CUDA error"
        self._tell(ev.WorkerFailed(self.now_s, attempt, rank, "raised", "host", words, step=self._step))

    def _hangs(self, attempt: int) -> None:
        hang_s = self.pace.hang
        self._at(self.now_s + hang_s, lambda: self._tell(ev.NoProgress(self.now_s, attempt, hang_s, hang_s)))

    def _gone(self, node: Node, host: str) -> None:
        if node.host == host:
            self._leaves(node)
            self._tell(ev.HostGone(self.now_s, host, "the node does not answer"))

    def _ends(self, fault: Fault) -> None:
        node = self.nodes[fault.node]
        node.faults.remove(fault)
        self._go_on()
        if not node.host:
            self._provide()

    # The back end

    def _join(self, node: Node) -> None:
        node.host = f"{node.name}.{next(self._names)}"
        self._by_host[node.host] = node
        self._tell(ev.HostJoined(self.now_s, node.host))

    def _leaves(self, node: Node) -> None:
        self._by_host.pop(node.host, None)
        node.host = ""

    def _provide(self) -> None:
        """Bring nodes that are free, as many as are asked for."""
        free = [n for n in self.nodes.values() if not n.host and not n.faults and n not in self._coming]
        while len(self._coming) < self._asked and free:
            node = free.pop(self.random.randrange(len(free)))
            self._coming.append(node)
            self._at(self.now_s + self.pace.provision, lambda node=node: self._arrives(node))

    def _arrives(self, node: Node) -> None:
        if node in self._coming:
            self._coming.remove(node)
            if not node.host and not node.faults and self.state.asked > 0:
                self._join(node)
            self._provide()

    def _on_askforhosts(self, action: act.AskForHosts) -> None:
        self._asked = action.count
        del self._coming[action.count :]
        self._provide()

    def _on_evict(self, action: act.Evict) -> None:
        self.tally.evictions += 1
        node = self._by_host.get(action.host)
        if node is not None:
            self.tally.wrong += not node.faults
            self._leaves(node)

    def _on_release(self, action: act.Release) -> None:
        node = self._by_host.get(action.host)
        if node is not None:
            self._leaves(node)

    # Executors

    def _on_openstore(self, action: act.OpenStore) -> None:
        self._after(0.05, action.host, lambda now: ev.StoreOpened(now, action.attempt, 29500))

    def _on_start(self, action: act.Start) -> None:
        for host in action.hosts:
            self._after(self.pace.start, host, lambda now, host=host: ev.Started(now, action.attempt, host))
        begins_s = self.now_s + self.pace.start + self.pace.first_step
        self._at(begins_s, lambda: self._first_step(action.attempt))

    def _on_stop(self, action: act.Stop) -> None:
        if self._is_going:
            self._stand()
        for host in action.hosts:
            self._after(self.pace.stop, host, lambda now, host=host: ev.Stopped(now, action.attempt, host))

    def _on_gather(self, action: act.Gather) -> None:
        self._at(self.now_s + self.pace.evidence, lambda: self._name(action.attempt))

    def _name(self, attempt: int) -> None:
        per_host = self.job.workers_per_host
        silent = [
            place * per_host
            for place, host in enumerate(self.state.placement)
            if (node := self._by_host.get(host)) is None or node.effects & {"hangs", "dies"}
        ]
        self._tell(ev.SuspectsNamed(self.now_s, attempt, tuple(silent), "it did not answer" if silent else ""))

    def _on_check(self, action: act.Check) -> None:
        number, host = action.number, action.host

        def answer(now_s: float) -> ev.Event:
            node = self._by_host[host]
            if action.kind != "passive" and node.effects & {"fails", "hangs"}:
                return ev.CheckFailed(now_s, host, number, "its device does not answer")
            return ev.CheckPassed(now_s, host, number)

        self._after(self.pace.checks[action.kind], host, answer)

    def _on_openincident(self, action: act.OpenIncident) -> None:
        self.tally.recoveries += 1

    def _on_finish(self, action: act.Finish) -> None:
        self._pause()
        self.tally.endings.append(f"status {action.status}: {action.reason}")
        for node in list(self._by_host.values()):
            self._leaves(node)
        self._coming.clear()
        self._at(self.now_s + self.pace.operator, self._begin)
