"""What the driver knows of its job: a value that the journal's events give when they are applied again.

Which host gets which ranks. functions over values;.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from phalanx.checks.pairwise_tests import Pair
from phalanx.run.decide.events import Fault
from phalanx.run.decide.policy import CheckKind, Job, Policy

Phase = Literal["waiting", "opening", "starting", "running", "diagnosing", "stopping", "checking", "ended"]
HostState = Literal["joining", "spare", "active", "unknown", "suspect", "draining", "evicted", "gone"]
Cause = Literal["failure", "hang", "planned"]

PHASES: tuple[Phase, ...] = (
    *("waiting", "opening", "starting", "running"),
    *("diagnosing", "stopping", "checking", "ended"),
)


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the state."""


class Host(Value, frozen=True):
    """A host that has ever been heard of.

    Attributes:
        state: ``joining``: not checked yet; ``spare``: ready; ``active``: has ranks; ``unknown``: not heard of for a
            while; ``suspect``: being checked after a fault; ``draining``: to leave when it can be replaced;
            ``evicted``: not to come back; ``gone``: the back end says so, or it was released.
        why: the state.
        leaves: why it shall leave (a person drains it, it is slow); empty: it stays.
        is_proven: it has taken part in an attempt that ran.
        place: in the placement of the present or last attempt; -1: it has none.
    """

    rack: str
    state: HostState
    why: str = ""
    leaves: str = ""
    is_proven: bool = False
    place: int = -1


class PendingCheck(Value, frozen=True):
    """A check whose answer is awaited.

    Attributes:
        is_extended: it was late, and asked again, with more time.
    """

    number: int
    kind: CheckKind
    deadline_s: float
    peers: tuple[str, ...] = ()
    is_extended: bool = False


class Failure(Value, frozen=True):
    """What ended a rank.

    Attributes:
        kind: as in `WorkerFailed`; ``start``: it could not be started; ``silent``: it did not answer; ``loss``: its
            loss is not a number; ``left``: it has ended well, before the others.
        rank: -1: the host as a whole.
    """

    rank: int
    kind: str
    fault: Fault
    summary: str
    follows: bool = False
    step: int = -1


class LastWord(Value, frozen=True):
    """What the code said in the recovery before: the same again means that it is the code's fault."""

    words: str
    step: int
    kind: str


class Ways(Value, frozen=True):
    """What a host has found of the network to its peers, by their names; see `CheckPassed`."""

    bad: dict[str, str] = {}
    rates: dict[str, float] = {}


class Rounds(Value, frozen=True):
    """Tests of all hosts of the attempt with each other: of neighbours, then of doubtful hosts with good ones.

    Attributes:
        kind: of the checks.
        first: pairs of the first round.
        doubts: in the second round, by host: what was bad in the first.
        second: pairs that have been asked for in the second round: a doubtful host, and the one that tests it.
        turns: of the second round that are still to come; in none of them a host is in two pairs.
        by_spares: no pair of the first round was good, so spares are the partners of the second.
    """

    kind: CheckKind
    first: tuple[Pair, ...]
    doubts: dict[str, str] = {}
    second: tuple[Pair, ...] = ()
    turns: tuple[tuple[Pair, ...], ...] = ()
    by_spares: bool = False


class Recovery(Value, frozen=True):
    """What has been learnt since something went wrong with the present attempt.

    Attributes:
        why: what was seen first.
        failures: by host.
        failed: how many ranks they are.
        words: how many ranks say the same of themselves, by their words; of the first few different ones.
        is_clear: a failure is among them that explains the others, so that no other word need be waited for.
        suspects: named by evidence, with what was seen.
        lost: hosts that are gone or do not answer.
        stuck: hosts with processes that do not end.
        evict: hosts that must go, and why.
        is_decided: the ladder has spoken.
        rounds: the hosts are tested with each other; None: they are not.
    """

    cause: Cause
    began_s: float
    why: str
    failures: dict[str, tuple[Failure, ...]] = {}
    failed: int = 0
    words: dict[str, int] = {}
    is_clear: bool = False
    suspects: dict[str, str] = {}
    group: str = ""
    group_hosts: tuple[str, ...] = ()
    lost: dict[str, str] = {}
    stuck: dict[str, str] = {}
    evict: dict[str, str] = {}
    is_decided: bool = False
    rounds: Rounds | None = None


class Incident(Value, frozen=True):
    """The report that is open.

    Attributes:
        phase_s: seconds so far, by phase.
        step: the highest that was done before it; -1: not known.
        counted_s: of the present phase the time until then is in `phase_s` already.
        ranks: of the attempt that was hit.
        hosts: that have left since, and why.
        to_do: what people should do.
    """

    number: int
    began_s: float
    phase_s: dict[str, float] = {}
    step: int = -1
    counted_s: float = 0.0
    ranks: int = 0
    hosts: dict[str, str] = {}
    to_do: tuple[str, ...] = ()


class Ending(Value, frozen=True):
    """How the job will end when its processes have.

    Attributes:
        grace_s: that these have between SIGTERM and SIGKILL.
    """

    status: int
    reason: str
    requeue: bool = False
    by_person: bool = False
    grace_s: float = 0.0


class Progress(Value, frozen=True):
    """Steps.

    Attributes:
        best: highest absolute step of all attempts; -1: none is known.
        done: steps of the present attempt, as they are counted; -1: none.
        is_absolute: how `done` is counted.
        most: steps that an attempt before this one has made, of its own; -1: none has, or they are absolute.
        last_done: those of the attempt before, at its end.
        is_new: the present attempt has made an absolute step that none has made before.
        was_new: the attempt before had progressed.
        base: highest absolute step that an attempt has gone on after; -1: none is known.
        after: the step of the training that the present attempt has gone on after, where whoever restored it has said
            so; -1: nobody has.
        since_s: when the present attempt has made its first step; None: it has not.
        lived_s: seconds from then to the newest one that was heard of.
    """

    best: int = -1
    done: int = -1
    is_absolute: bool = False
    most: int = -1
    last_done: int = -1
    is_new: bool = False
    was_new: bool = False
    base: int = -1
    after: int = -1
    since_s: float | None = None
    lived_s: float = 0.0

    @property
    def has_run(self) -> bool:
        """Any attempt has ever made a step."""
        return max(self.done, self.best, self.most) >= 0

    def absolute(self, step: int) -> int:
        """A step of the present attempt, as a rank counts it, as far as it is known as one of the training."""
        return step if self.is_absolute or step < 0 else step + max(self.after, 0)

    @property
    def step(self) -> int:
        """Where the training is, for people: of the present attempt, or of those before where it has made none yet."""
        if self.done >= 0:
            return self.done
        return self.best if self.best >= 0 else self.last_done


class Brakes(Value, frozen=True):
    """Against restarting for ever.

    Attributes:
        idle: recoveries in a row without progress, the one after the last progress counted.
        recoveries: in all.
        not_before_s: when the next attempt may begin.
        unfit: hosts that came one after another and did not pass their check.
        struck: places that have lost a host since the last progress, and were not counted for it.
    """

    idle: int = 0
    recoveries: int = 0
    not_before_s: float = 0.0
    unfit: int = 0
    struck: tuple[int, ...] = ()


class Hangs(Value, frozen=True):
    """What earlier hangs of the job have taught, in which nothing moved and nothing else was known.

    Attributes:
        count: how many.
        step: the highest after which it hung.
        places: where in their code ranks were then.
        limit_s: of the last one.
        floor_s: what `phalanx.run.judge.step_limits.LimitConfig.floor_s` is at least from now on; 0: as it is set.
        is_widened: that has been done for the last one.
    """

    count: int = 0
    step: int = -1
    places: tuple[str, ...] = ()
    limit_s: float = 0.0
    floor_s: float = 0.0
    is_widened: bool = False


class State(Value, frozen=True):
    """All of it.

    Attributes:
        now_s: time of the last event.
        attempt: number of the present or last attempt; 0: none yet.
        highest_seen: attempt number that some executor has seen; the next one is above it.
        placement: hosts of the present or last attempt in order of their ranks.
        store_port: of the present attempt.
        left: ranks of the attempt that have ended with status 0 while others had not, with their steps.
        version: of the code; empty: the present one.
        phase_since_s: when the phase began.
        deadline_s: when the phase will be waited for no longer.
        staying: how many hosts there are of each state that are not to leave.
        awaited: hosts whose answer the phase waits for, in order.
        lacking_since_s: since when there are too few hosts to start.
        checks: by host.
        checks_due_s: the limit of no check is before that; None: none is awaited, or the last one was answered.
        ways: by host that has tested them, in a recovery with `Rounds`.
        history: times of faults, by where they were; see `phalanx.run.decide.fault_attribution` and ``ladder``.
        leaving: hosts with `Host.leaves`, to find them quickly.
        asked: for how many hosts the back end was asked last.
        began_s: when the job did; None: it has not.
        training_s: seconds that attempts have made steps, before the present phase.
    """

    policy: Policy
    job: Job
    now_s: float = 0.0
    phase: Phase = "waiting"
    attempt: int = 0
    highest_seen: int = 0
    hosts: dict[str, Host] = {}
    staying: dict[HostState, int] = {}
    placement: tuple[str, ...] = ()
    store_port: int = 0
    left: dict[int, int] = {}
    version: str = ""
    phase_since_s: float = 0.0
    deadline_s: float | None = None
    awaited: dict[str, None] = {}
    lacking_since_s: float | None = None
    checks: dict[str, PendingCheck] = {}
    checks_due_s: float | None = None
    check_count: int = 0
    ways: dict[str, Ways] = {}
    progress: Progress = Progress()
    brakes: Brakes = Brakes()
    hangs: Hangs = Hangs()
    recovery: Recovery | None = None
    incident: Incident | None = None
    incident_count: int = 0
    last_word: LastWord | None = None
    history: dict[str, tuple[float, ...]] = {}
    leaving: tuple[str, ...] = ()
    asked: int = 0
    ending: Ending | None = None
    began_s: float | None = None
    training_s: float = 0.0

    @property
    def world_size(self) -> int:
        """Ranks of the present attempt."""
        return len(self.placement) * self.job.workers_per_host

    @property
    def has_workers(self) -> bool:
        """Whether processes of the present attempt may be there."""
        return self.phase in ("opening", "starting", "running", "diagnosing", "stopping")

    @property
    def grace_s(self) -> float:
        """What workers that are being stopped have between SIGTERM and SIGKILL; 0 also in a recovery."""
        return self.ending.grace_s if self.ending is not None and self.recovery is None else 0.0

    @property
    def advice_due_s(self) -> float | None:
        """When an advise-only policy will have heard enough to say what it would do."""
        if not self.policy.advise_only or self.recovery is None or self.recovery.is_decided:
            return None
        return self.recovery.began_s + self.policy.settle_s if self.phase in ("starting", "running") else None

    def count(self, mark: str) -> int:
        """How often the history has this within `Policy.fault_window_s`."""
        oldest_s = self.now_s - self.policy.fault_window_s
        return sum(time_s >= oldest_s for time_s in self.history.get(mark, ()))

    def host_of(self, rank: int) -> str | None:
        """Whose rank it is in the present placement."""
        return self.placement[rank // self.job.workers_per_host] if 0 <= rank < self.world_size else None

    def place_of(self, host: str) -> int:
        """Where a host is in the placement; -1: nowhere."""
        known = self.hosts.get(host)
        return -1 if known is None else known.place

    def has_place(self, host: str) -> bool:
        """Whether a host is in the placement."""
        return self.place_of(host) >= 0


def initial(policy: Policy, job: Job) -> State:
    """The state of a job to which nothing has happened yet."""
    return State(policy=policy, job=job)


def next_deadline(state: State) -> float | None:
    """When a `Tick` is wanted at the latest, of the events' clock; None: no time is waited for."""
    if state.phase == "ended":
        return None
    times = [] if state.checks_due_s is None else [state.checks_due_s]
    if state.deadline_s is not None:
        times.append(state.deadline_s)
    if state.advice_due_s is not None:
        times.append(state.advice_due_s)
    return min(times, default=None)


_THERE: tuple[HostState, ...] = ("joining", "spare", "active", "suspect")


def count_ready(state: State) -> int:
    """How many `ready_hosts` there are, without the cost of looking at each."""
    return state.staying.get("spare", 0) + state.staying.get("active", 0)


def ready_hosts(state: State) -> list[str]:
    """Hosts that may get ranks: connected, checked, and not to leave; in order of rack and name."""
    hosts = state.hosts
    ready = [
        name for name, host in hosts.items() if (host.state == "spare" or host.state == "active") and not host.leaves
    ]
    return sorted(ready, key=lambda name: (hosts[name].rack, name))


def place(previous: tuple[str, ...], ready: list[str], size: int, hosts: Mapping[str, Host]) -> tuple[str, ...]:
    """Hosts of the next attempt in order of their ranks.

    A host keeps its place, and one that replaces another takes the place of that; a replacement of the same rack is
    preferred. If the number of hosts has changed, hosts that had ranks are chosen first, and all are ordered by rack
    and name.

    Args:
        previous: the placement before.
        ready: at least `size` hosts, in order of rack and name.
        hosts: for racks.
    """
    available = set(ready)
    stay = [host for host in previous if host in available]
    if len(previous) != size:
        first = set(stay[:size])
        others = [host for host in ready if host not in first][: size - len(first)]
        return tuple(sorted([*first, *others], key=lambda name: (hosts[name].rack, name)))
    kept = set(stay)
    fresh = [host for host in ready if host not in kept]
    return tuple(host if host in kept else _take(fresh, hosts, host) for host in previous)


def _take(fresh: list[str], hosts: Mapping[str, Host], leaver: str) -> str:
    """The replacement of a host, out of `fresh`."""
    rack = hosts[leaver].rack if leaver in hosts else ""
    same = next((i for i, name in enumerate(fresh) if hosts[name].rack == rack), 0)
    return fresh.pop(same)


def missing_hosts(state: State) -> int:
    """How many hosts the back end should still bring: what job and spares need, less those that are there or may be."""
    # A host that is not heard of may still do its work, but cannot begin any.
    unknown = state.staying.get("unknown", 0) if state.has_workers else 0
    there = unknown + sum(state.staying.get(kind, 0) for kind in _THERE)
    return max(0, state.job.hosts + state.job.spares - there)


def size_to_start(state: State, ready: int) -> int:
    """On how many hosts the job can start now; 0: it has to wait."""
    if ready >= state.job.hosts:
        return state.job.hosts
    since_s = state.lacking_since_s
    has_waited = since_s is not None and state.now_s >= since_s + state.policy.replace_wait_s
    if state.policy.when_missing == "shrink" and has_waited:
        return next((size for size in state.job.sizes() if size <= ready), 0)
    return 0


def can_spare(state: State, leavers: set[str]) -> bool:
    """Whether the job could go on at once without these hosts, as the policy has it."""
    ready = len([name for name in ready_hosts(state) if name not in leavers])
    return ready >= state.job.hosts or (
        state.policy.when_missing == "shrink" and any(size <= ready for size in state.job.sizes())
    )
