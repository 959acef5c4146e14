"""What the driver knows of its job, and one call of `decide` on its way to the next state.

`State` is a value: applying the journal's events again gives it again. `Turn` begins with a state, and what the answers
to an event set there becomes the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import replace

from phalanx.checks.pairwise_tests import Pair
from phalanx.run.decide import actions
from phalanx.run.decide.actions import Action, AddToIncident, IncidentResult, KeepDetection, Where
from phalanx.run.decide.events import CheckKind, Fault
from phalanx.run.decide.policy import Job, Policy

Phase = Literal["waiting", "opening", "starting", "running", "diagnosing", "stopping", "checking", "ended"]
HostState = Literal["joining", "spare", "active", "unknown", "suspect", "draining", "evicted", "gone"]
Cause = Literal["failure", "hang", "planned"]

PHASES: tuple[Phase, ...] = get_args(Phase)
NOWHERE = Where()

MOST_DETECTIONS = 64
"""What judges have found that is remembered; all of it is in the journal and in the run folder."""


class StatePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the state."""


class Host(StatePart, frozen=True):
    """A host that has ever been heard of."""

    rack: str
    # ``joining``: not checked yet; ``spare``: ready; ``active``: has ranks; ``unknown``: not heard of for a while;
    # ``suspect``: being checked after a fault; ``draining``: to leave when it can be replaced; ``evicted``: not to come
    # back; ``gone``: the back end says so, or it was released.
    state: HostState
    why: str = ""
    leaves: str = ""  # why it shall leave (a person drains it, it is slow); empty: it stays
    is_proven: bool = False  # it has taken part in an attempt that ran
    place: int = -1  # in the placement of the present or last attempt; -1: none


class PendingCheck(StatePart, frozen=True):
    """A check whose answer is awaited; `is_extended`: it was late and asked again, with more time."""

    number: int
    kind: CheckKind
    deadline_s: float
    peers: tuple[str, ...] = ()
    is_extended: bool = False


class Failure(StatePart, frozen=True):
    """What ended a rank."""

    rank: int  # -1: the host as a whole
    # As in `WorkerFailed`; ``start``: it could not be started; ``silent``: it did not answer; ``loss``: its loss is not
    # a number; ``left``: it has ended well, before the others.
    kind: str
    fault: Fault
    summary: str
    follows: bool = False  # it only reports that a peer is gone
    step: int = -1


class LastFailure(StatePart, frozen=True):
    """What the code reported in the recovery before: the same again means that it is the code's fault."""

    text: str
    step: int
    kind: str


class PeerTests(StatePart, frozen=True):
    """What a host has found of the network to its peers, by name; see `CheckPassed`."""

    bad: dict[str, str] = {}
    rates: dict[str, float] = {}


class Rounds(StatePart, frozen=True):
    """Tests of all hosts of the attempt with each other: of neighbours, then of doubtful hosts with good ones."""

    kind: CheckKind
    first: tuple[Pair, ...]
    doubts: dict[str, str] = {}  # in the second round, by host: what was bad in the first
    # Pairs asked for in the second round so far: a doubtful host, and the one that tests it.
    second: tuple[Pair, ...] = ()
    # Of the second round that are still to come; no host is in two pairs of a turn.
    turns: tuple[tuple[Pair, ...], ...] = ()
    by_spares: bool = False  # no pair of the first round was good, so spares are the partners of the second


class Recovery(StatePart, frozen=True):
    """What is known since something went wrong with the present attempt."""

    cause: Cause
    began_s: float
    why: str
    failures: dict[str, tuple[Failure, ...]] = {}  # by host; `failed`: how many ranks they are
    failed: int = 0
    texts: dict[str, int] = {}  # how many ranks report the same of themselves, by text; of the first few different ones
    is_clear: bool = False  # one failure explains the others, so that no other report need be waited for
    suspects: dict[str, str] = {}  # hosts named by evidence, and why
    group: str = ""
    group_hosts: tuple[str, ...] = ()
    lost: dict[str, str] = {}  # hosts that are gone or do not answer
    stuck: dict[str, str] = {}  # hosts with processes that do not end
    evict: dict[str, str] = {}  # hosts that must go, and why
    is_decided: bool = False  # what to do has been chosen
    rounds: Rounds | None = None


class OpenReport(StatePart, frozen=True):
    """The incident report that is open."""

    number: int
    began_s: float
    phase_s: dict[str, float] = {}
    step: int = -1  # the highest that was done before it; -1: not known
    counted_s: float = 0.0  # until then the time of the present phase is in `phase_s` already
    ranks: int = 0
    hosts: dict[str, str] = {}
    to_do: tuple[str, ...] = ()


class Ending(StatePart, frozen=True):
    """How the job ends when its processes have; `grace_s`: theirs between SIGTERM and SIGKILL."""

    status: int
    reason: str
    requeue: bool = False
    by_person: bool = False
    grace_s: float = 0.0


class Progress(StatePart, frozen=True):
    """Steps; -1: none, or not known."""

    best: int = -1  # highest absolute step of all attempts
    done: int = -1  # of the present attempt, as they are counted
    is_absolute: bool = False  # how `done` is counted
    most: int = -1  # that an attempt before this one has made, of its own; -1 also where they are absolute
    last_done: int = -1  # of the attempt before, at its end
    is_new: bool = False  # the present attempt has made an absolute step that none has made before
    was_new: bool = False  # the attempt before had progressed
    base: int = -1  # highest absolute step that an attempt has gone on after
    after: int = -1  # absolute step that the present attempt has gone on after, as restoring reported
    first: int = -1  # lowest absolute step with which an attempt has begun
    earlier: int = 0  # steps of the attempts before this one together, where they are not absolute
    since_s: float | None = None  # when the present attempt has made its first step
    lived_s: float = 0.0  # from then to the newest step that was heard of

    @property
    def has_run(self) -> bool:
        """Any attempt has ever made a step."""
        return max(self.done, self.best, self.most) >= 0


class RestartCounts(StatePart, frozen=True):
    """What keeps the job from restarting for ever."""

    idle: int = 0  # recoveries in a row without progress, counting the one after the last progress
    recoveries: int = 0
    not_before_s: float = 0.0  # when the next attempt may begin
    unfit: int = 0  # hosts that came one after another and did not pass their check
    struck: tuple[int, ...] = ()  # places that have lost a host since the last progress, and were not counted for it


class Hangs(StatePart, frozen=True):
    """Earlier hangs of the job, in which nothing moved and nothing else was known."""

    count: int = 0
    step: int = -1  # the highest after which it hung
    places: tuple[str, ...] = ()  # where in their code ranks were then
    limit_s: float = 0.0
    floor_s: float = 0.0  # least `phalanx.run.judge.step_limits.LimitConfig.floor_s` from now on; 0: as it is set
    is_widened: bool = False  # that was done for the last one


class State(StatePart, frozen=True):
    """All of it."""

    policy: Policy
    job: Job
    now_s: float = 0.0  # of the last event
    phase: Phase = "waiting"
    attempt: int = 0  # the present or last one; 0: none yet
    highest_seen: int = 0  # attempt number that some executor has seen; the next one is above it
    hosts: dict[str, Host] = {}
    # How many hosts there are of each state that are not to leave: counted along, since there may be ten thousand.
    staying: dict[HostState, int] = {}
    placement: tuple[str, ...] = ()  # hosts of the present or last attempt in order of their ranks
    store_port: int = 0
    left: dict[int, int] = {}  # ranks that have ended with status 0 while others had not, and their steps
    version: str = ""  # of the code; empty: the present one
    phase_since_s: float = 0.0
    deadline_s: float | None = None  # until when the phase is waited for
    awaited: dict[str, None] = {}  # hosts whose answer the phase waits for, in order
    lacking_since_s: float | None = None  # since when there are too few hosts to start
    checks: dict[str, PendingCheck] = {}  # by host
    checks_due_s: float | None = None  # no check's limit is before that; None: none, or the last one was answered
    check_count: int = 0
    peer_tests: dict[str, PeerTests] = {}  # by host that has tested them, in a recovery with `Rounds`
    progress: Progress = Progress()
    restarts: RestartCounts = RestartCounts()
    hangs: Hangs = Hangs()
    recovery: Recovery | None = None
    incident: OpenReport | None = None
    incident_count: int = 0
    detections: tuple[KeepDetection, ...] = ()  # what judges have found, the newest last; the first are forgotten
    detection_count: int = 0
    last_failure: LastFailure | None = None
    history: dict[str, tuple[float, ...]] = {}  # times of faults, by where they were: see `escalation`
    faulty_s: tuple[float, ...] = ()  # when hosts had to leave since a judge found them faulty, in the last hour
    leaving: tuple[str, ...] = ()  # hosts with `Host.leaves`, to find them quickly
    asked: int = 0  # for so many hosts the back end was asked last
    ending: Ending | None = None
    began_s: float | None = None
    training_s: float = 0.0  # in which attempts have made steps, before the present phase

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
        """When an advise-only policy will have heard enough to report what it would do."""
        if not self.policy.advise_only or self.recovery is None or self.recovery.is_decided:
            return None
        return self.recovery.began_s + self.policy.settle_s if self.phase in ("starting", "running") else None

    @property
    def most_to_blame(self) -> int:
        """So many hosts may be at fault at once; more have a common cause."""
        return max(2, len(self.placement) // 8)

    @property
    def most_unfit(self) -> int:
        """So many hosts may fail one after another, when they come or in a row without progress; more have a cause."""
        return max(3, self.job.hosts // 8)

    def is_driver_cut_off(self, silent: int) -> bool:
        """Whether so many silent hosts point to the driver's own network, in a job that goes on."""
        # A switch or a power supply takes some hosts; more than half at once are rather well, and not heard.
        return self.ending is None and silent > self.most_to_blame and 2 * silent > len(self.placement)

    def count(self, mark: str) -> int:
        """How often the history has this within `Policy.fault_window_s`."""
        # Over weeks every host has a fault some day: only those that come together mean something.
        oldest_s = self.now_s - self.policy.fault_window_s
        return sum(time_s >= oldest_s for time_s in self.history.get(mark, ()))

    def host_of(self, rank: int) -> str | None:
        """The host of a rank in the present placement."""
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
    times_s = (state.checks_due_s, state.deadline_s, state.advice_due_s)
    return min((time_s for time_s in times_s if time_s is not None), default=None)


def count_ready(state: State) -> int:
    """How many `ready_hosts` there are, without the cost of looking at each."""
    return state.staying.get("spare", 0) + state.staying.get("active", 0)


def ready_hosts(state: State) -> list[str]:
    """Hosts that may get ranks: connected, checked, and not to leave; in order of rack and name."""
    hosts = state.hosts
    ready = [name for name, host in hosts.items() if host.state in ("spare", "active") and not host.leaves]
    return sorted(ready, key=lambda name: (hosts[name].rack, name))


def can_spare(state: State, leavers: set[str]) -> bool:
    """Whether the job could go on at once without these hosts, under its policy."""
    ready = len([name for name in ready_hosts(state) if name not in leavers])
    may_shrink = state.policy.when_missing == "shrink"
    return ready >= state.job.hosts or (may_shrink and any(size <= ready for size in state.job.sizes()))


def listed(hosts: Iterable[str]) -> str:
    """Such as ``a, b, c and 497 more``."""
    every = list(hosts)
    return ", ".join(every[:5]) + (f" and {len(every) - 5} more" if len(every) > 5 else "")


Own = dict[str, dict[str, Any]]
"""Dictionaries of a state, by field, that nobody but the caller of `decide` holds: these are changed in place."""


class Turn:
    """One call of `decide`: the state as it becomes, and the actions so far."""

    def __init__(self, state: State, at_s: float, own: Own) -> None:
        # A clock that goes back, or is not a number, stands still.
        now_s = at_s if at_s > state.now_s else state.now_s
        self.state = replace(state, now_s=now_s) if now_s != state.now_s else state
        self.actions: list[Action] = []
        self.hosts_changed = False
        self._own = own

    @property
    def now_s(self) -> float:
        """Time of the event."""
        return self.state.now_s

    def set(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **changes)

    def learn(self, **changes: Any) -> None:
        """Change fields of the recovery, if one goes on."""
        if self.state.recovery is not None:
            self.set(recovery=replace(self.state.recovery, **changes))

    def act(self, *wanted: Action) -> None:
        """Have these performed."""
        self.actions.extend(wanted)

    def owned(self, field: str) -> dict[str, Any]:
        """A dictionary of the state to change in place."""
        # Copied first unless nobody else holds it: a copy at each event of ten thousand hosts that join is quadratic.
        present: dict[str, Any] = getattr(self.state, field)
        if self._own.get(field) is not present:
            present = self._own[field] = dict(present)
            self.set(**{field: present})
        return present

    # Hosts

    def set_host(self, name: str, **changes: Any) -> None:
        """Change fields of a host; one that is not known yet needs all."""
        hosts = self.owned("hosts")
        before = hosts.get(name)
        after = hosts[name] = replace(before, **changes) if before else Host(**changes)
        self.hosts_changed = True
        was = before.state if before is not None and not before.leaves else None
        now = after.state if not after.leaves else None
        if was != now:
            staying = dict(self.state.staying)
            if was is not None:
                staying[was] -= 1
            if now is not None:
                staying[now] = staying.get(now, 0) + 1
            self.set(staying=staying)
        if after.leaves != (before.leaves if before else ""):
            others = tuple(other for other in self.state.leaving if other != name)
            self.set(leaving=(*others, name) if after.leaves else others)

    def await_check(self, name: str, check: PendingCheck) -> None:
        """Wait for the answer of a check."""
        due_s = self.state.checks_due_s
        self.owned("checks")[name] = check
        self.set(checks_due_s=check.deadline_s if due_s is None else min(due_s, check.deadline_s))

    def drop_check(self, name: str) -> None:
        """Stop waiting for an answer of this host's check."""
        if name in self.state.checks:
            checks = self.owned("checks")
            del checks[name]
            if not checks:
                self.set(checks_due_s=None)

    def remove_host(self, name: str, state: HostState, why: str) -> None:
        """Make it ``gone`` or ``evicted``; nothing is awaited from it any more."""
        incident = self.state.incident
        if incident is not None:
            self.set(incident=replace(incident, hosts={**incident.hosts, name: why}))
        self.set_host(name, state=state, why=why, leaves="")
        self.drop_check(name)
        self.no_longer_awaited(name)

    def evict(self, name: str, why: str) -> None:
        """Take it out for good."""
        self.remove_host(name, "evicted", why)
        self.act(actions.Evict(name, why))

    def release(self, name: str, why: str) -> None:
        """Take it out; it may join again."""
        self.remove_host(name, "gone", why)
        self.act(actions.Release(name, why))

    def no_longer_awaited(self, name: str) -> None:
        """The phase has its answer."""
        if name in self.state.awaited:
            del self.owned("awaited")[name]

    # Phases

    def enter(self, phase: Phase, within_s: float | None = None, awaited: Iterable[str] = ()) -> None:
        """Begin a phase, which is waited for so long, or until these hosts have answered."""
        state = self.state
        deadline_s = None if within_s is None else state.now_s + within_s
        if state.incident is not None:
            self.set(incident=_with_phase(state.incident, state))
        if state.phase == "running":
            self.set(training_s=state.training_s + max(state.now_s - state.phase_since_s, 0.0))
        self.set(phase=phase, phase_since_s=state.now_s, deadline_s=deadline_s, awaited=dict.fromkeys(awaited))

    def finish(self, ending: Ending) -> None:
        """End the job; no process of it needs to be ended by hand any more."""
        result: IncidentResult = "gave up"
        if ending.status == actions.DONE:
            result = "recovered"
        elif ending.status in (actions.STOPPED, actions.TIME_SHORT):
            result = "stopped"
        text = f"the job has ended with status {ending.status}: {ending.reason}"
        self.close_incident(text, result=result, status=ending.status)
        # Hosts that are still to come would wait for a driver that is gone.
        if self.state.asked:
            self.act(actions.AskForHosts(0))
        self.enter("ended")
        self.set(ending=ending, recovery=None, peer_tests={}, checks={}, checks_due_s=None)
        self.set(asked=0, lacking_since_s=None)
        self.act(actions.Finish(ending.status, ending.reason, ending.requeue))

    # What people read

    def alert(self, level: Literal["info", "warning", "error"], text: str, host: str = "") -> None:
        """Alert people."""
        self.act(actions.Alert(level, text, host))

    def open_incident(
        self, seen_by: str, text: str, where: Where = NOWHERE, late_s: float = 0.0, *, is_own: bool = True
    ) -> None:
        """Begin a report, or add to the one that is open.

        Args:
            late_s: how long it was so before it was noticed.
            is_own: it does not only follow from something else.
        """
        state = self.state
        if state.incident is not None:
            self.note(seen_by, text, where, is_own=is_own)
            return
        number = state.incident_count + 1
        # Steps of this process alone do not show how far back the next attempt begins.
        step = state.progress.done if state.progress.is_absolute else -1
        spent = {"detecting": round(late_s, 6)} if late_s > 0 else {}
        incident = OpenReport(number, state.now_s, spent, step, ranks=state.world_size)
        self.set(incident=incident, incident_count=number)
        self.act(actions.OpenIncident(number, state.attempt, seen_by, text, where, is_own))

    def note(self, by: str, text: str, where: Where = NOWHERE, *, is_own: bool = False) -> None:
        """Add what was seen to the open report, if any; `is_own`: it is what is wrong with the attempt."""
        if self.state.incident is not None:
            self.act(AddToIncident(self.state.incident.number, by, text, where, is_own=is_own))

    def advise(self, text: str) -> None:
        """Add to the open report, if any, what people should do."""
        incident = self.state.incident
        if incident is not None and text not in incident.to_do:
            self.set(incident=replace(incident, to_do=(*incident.to_do, text)))

    def decided(self, what: str, why: str) -> None:
        """Add to the open report, if any, what was decided."""
        if self.state.incident is not None:
            self.act(AddToIncident(self.state.incident.number, "driver", what, is_decision=True, why=why))

    def close_incident(
        self, text: str, first_step: int = -1, result: IncidentResult = "recovered", status: int = -1
    ) -> None:
        """Close the open report, if any; `first_step`: absolute, that was done first after it."""
        if self.state.incident is None:
            return
        incident = _with_phase(self.state.incident, self.state)
        # The next attempt makes `first_step` first, so all from there up to the last one done are made again.
        is_known = incident.step >= 0 and first_step >= 0
        close = actions.CloseIncident(
            incident.number,
            text,
            incident.phase_s,
            max(0, incident.step - first_step + 1) if is_known else None,
            result,
            incident.step,
            first_step - 1 if is_known else -1,
            status,
            incident.ranks,
            incident.hosts,
            incident.to_do,
        )
        self.set(incident=None)
        self.act(close)

    def all_started(self) -> None:
        """What is left of the phase is the time to the first step."""
        if (incident := self.state.incident) is not None:
            self.set(incident=replace(_with_phase(incident, self.state, "starting"), counted_s=self.now_s))


def _with_phase(incident: OpenReport, state: State, name: str = "") -> OpenReport:
    """The report with the time of the phase that ends now."""
    seconds = state.now_s - max(state.phase_since_s, incident.began_s, incident.counted_s)
    if seconds <= 0:
        return incident
    has_started = state.phase == "starting" and not state.awaited
    key = name or ("first step" if has_started else state.phase)
    spent = {**incident.phase_s, key: round(incident.phase_s.get(key, 0.0) + seconds, 6)}
    return replace(incident, phase_s=spent)
