"""What holds for every order of events: also stale, doubled and impossible ones, and answers that are lost."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
from decide_helpers import Speeds, World, ended
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from phalanx.detect.detection import Culprit, Detection
from phalanx.run.decide import actions as act
from phalanx.run.decide import events as ev
from phalanx.run.decide.decide import decide, event_from_json, replay, to_json
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import PHASES, State, initial, next_deadline, ready_hosts

NAMES = ["a", "b", "c", "d", "e"]
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

names = st.sampled_from([*NAMES, "stranger"])
offsets = st.sampled_from([0] * 8 + [-1, 1, 5])
ranks = st.integers(-1, 9)
steps = st.integers(-1, 30)
words = st.sampled_from(["x", "y 1", "y 2", ""])
bad_peers = st.dictionaries(names, st.sampled_from(["timed out", ""]), max_size=2)
peer_rates = st.dictionaries(names, st.sampled_from([0.0, 1e9, 9e9, -1.0]), max_size=2)
detections = st.builds(
    lambda host, slowdown: Detection(
        "slow host",
        f"{host} is slow",
        (Culprit("host", host, (), (host,)),),
        advice="evict",
        figures={"slowdown": slowdown},
    ),
    names,
    st.sampled_from([1.0, 1.05, 3.0, "much"]),
)


class Draft(msgspec.Struct, frozen=True):
    """An event whose attempt and check number are relative to what is current when it comes."""

    kind: type
    fields: dict
    attempt: int | None = None


def drafts() -> st.SearchStrategy[Draft]:
    kinds = [
        st.builds(Draft, st.just(kind), fields, attempt) for kind, fields, attempt in _FIELDS if isinstance(kind, type)
    ]
    return st.one_of(kinds)


def _dict(**fields: st.SearchStrategy) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries(fields)


_NONE = st.none()
_FIELDS = [
    (ev.JobBegun, _dict(), _NONE),
    (ev.DriverRestarted, _dict(), _NONE),
    (ev.Tick, _dict(), _NONE),
    (ev.HostJoined, _dict(host=names, rack=st.sampled_from(["", "r1", "r2"]), attempt=st.integers(0, 4)), _NONE),
    (ev.HostJoined, _dict(host=names, running=st.just((0, 1))), offsets),
    (ev.HostUnknown, _dict(host=names), _NONE),
    (ev.HostGone, _dict(host=names, why=words), _NONE),
    (ev.CheckPassed, _dict(host=names, number=offsets, bad_peers=bad_peers, peer_rates=peer_rates), _NONE),
    (
        ev.CheckFailed,
        _dict(
            host=names,
            number=offsets,
            why=words,
            bad_peers=bad_peers,
            peer_rates=peer_rates,
            is_between=st.booleans(),
        ),
        _NONE,
    ),
    (ev.SlowHost, _dict(host=names, factor=st.floats(0.5, 3)), offsets),
    (
        ev.Detected,
        _dict(
            judge=st.sampled_from(["stragglers", "machines"]),
            found=detections,
            incident=st.integers(0, 2),
            is_told=st.sampled_from([False, True]),
        ),
        _NONE,
    ),
    (ev.StoreOpened, _dict(port=st.integers(0, 70000)), offsets),
    (ev.StoreFailed, _dict(problem=words), offsets),
    (ev.Started, _dict(host=names), offsets),
    (ev.StartFailed, _dict(host=names, problem=words), offsets),
    (ev.Running, _dict(step=steps, is_absolute=st.booleans()), offsets),
    (ev.Advanced, _dict(step=steps, is_absolute=st.booleans()), offsets),
    (
        ev.WorkerFailed,
        _dict(
            rank=ranks,
            kind=st.sampled_from(["user", "raised", "interrupted", "signal", "status"]),
            fault=st.sampled_from(["user", "process", "host", "network", "storage"]),
            summary=words,
            follows=st.booleans(),
            step=steps,
        ),
        offsets,
    ),
    (ev.LeftEarly, _dict(ranks=st.tuples(ranks), steps=st.sampled_from([(), (3,), (3, 4)])), offsets),
    (ev.WorkersReturned, _dict(), st.sampled_from([1, 0, 3, 4, 5])),
    (ev.NoProgress, _dict(age_s=st.just(9.0), limit_s=st.just(5.0)), offsets),
    (
        ev.TrafficSilent,
        _dict(hosts=st.just(("a",)), silent_s=st.just(70.0), is_total=st.booleans(), without_progress=st.booleans()),
        offsets,
    ),
    (ev.LossBroken, _dict(step=steps, ranks=st.sampled_from([(), (0,), (99,)])), offsets),
    (
        ev.SuspectsNamed,
        _dict(ranks=st.tuples(ranks), group=st.sampled_from(["", "pipeline 0"]), group_ranks=st.tuples(ranks, ranks)),
        offsets,
    ),
    (ev.Stopped, _dict(host=names, stuck=st.sampled_from([(), (), (7,)])), offsets),
    (ev.DrainAsked, _dict(host=names), _NONE),
    (ev.EvictAsked, _dict(host=names), _NONE),
    (ev.ReturnAsked, _dict(host=names), _NONE),
]
_ENDS = st.sampled_from([Draft(ev.StopAsked, {}), Draft(ev.TimeShort, {"left_s": 9.0})])

policies = st.builds(
    Policy,
    advise_only=st.sampled_from([False, False, False, True]),
    when_missing=st.sampled_from(["wait", "shrink"]),
    replace_slow=st.booleans(),
    replace_faulty=st.booleans(),
    give_up_s=st.sampled_from([0.0, 50.0]),
    replace_wait_s=st.sampled_from([0.0, 10.0]),
    settle_s=st.sampled_from([0.0, 0.4]),
    max_restarts_without_step=st.integers(1, 4),
)
jobs = st.builds(
    Job,
    st.just("j"),
    hosts=st.integers(1, 4),
    workers_per_host=st.integers(1, 2),
    spares=st.integers(0, 1),
    previous_version=st.sampled_from(["", "v1"]),
)


class Watcher:
    """Feeds a state with events and checks what must hold after each."""

    def __init__(self, policy: Policy, job: Job) -> None:
        self.policy, self.job = policy, job
        self.state: State = initial(policy, job)
        self.now_s = 0.0
        self.journal: list[ev.Event] = []
        self.todo: list[act.Action] = []
        self.alive: dict[str, int] = {}
        self.returned: set[str] = set()
        self.opens = 0
        self.orders = 0
        self.mine, self.own = self.state, {}
        self.links: set[str] = set()
        """Hosts whose links are bad."""

    def event(self, draft: Draft) -> ev.Event:
        fields = dict(draft.fields)
        if draft.attempt is not None:
            fields["attempt"] = max(0, self.state.attempt + draft.attempt)
        if "number" in fields:
            pending = self.state.checks.get(fields["host"])
            fields["number"] += pending.number if pending else 0
        return draft.kind(at_s=self.now_s, **fields)

    def feed(self, event: ev.Event) -> list[act.Action]:
        before, text = self.state, to_json(self.state)
        after, actions = decide(before, event)
        assert to_json(before) == text, "the state that was given has been changed"
        assert decide(before, event) == (after, actions), "it is no function of its arguments"
        if len(self.journal) % 7 == 0:  # whoever changes states in place may stop doing so at any time
            self.mine, self.own = after, {}
        else:
            self.mine, same = decide(self.mine, event, self.own)
            assert (self.mine, same) == (after, actions), "it matters whether dictionaries are copied"
        self.journal.append(event)
        self._check(before, event, after, actions)
        self.state, self.todo = after, [*self.todo, *actions]
        return actions

    def _check(self, before: State, event: ev.Event, after: State, actions: list[act.Action]) -> None:
        self._recount(after)
        assert after.phase in PHASES and after.attempt in (
            before.attempt,
            max(before.attempt, before.highest_seen, *self._seen(event)) + 1,
        )
        assert before.hosts.keys() <= after.hosts.keys(), "a host was lost"
        for name, host in before.hosts.items():
            was_let = isinstance(event, ev.ReturnAsked) and event.host == name
            assert host.state != "evicted" or after.hosts[name].state == "evicted" or was_let
        goes_on = isinstance(event, ev.DriverRestarted) and before.ending is not None and before.ending.requeue
        assert before.phase != "ended" or after.phase == "ended" or goes_on
        self._follow_ranks(before, event, after, actions)
        self._count_restarts(before, event, after, actions)
        if self.policy.advise_only and not isinstance(event, ev.DriverRestarted) and not self.orders:
            assert not any(isinstance(a, act.Evict | act.Gather | act.OpenIncident) for a in actions)

    def _recount(self, state: State) -> None:
        """What the state keeps beside its hosts, so that nobody has to look at all of them, is true."""
        stay = Counter(host.state for host in state.hosts.values() if not host.leaves)
        assert stay == Counter(state.staying)
        assert set(state.leaving) == {name for name, host in state.hosts.items() if host.leaves}
        places = {name: host.place for name, host in state.hosts.items() if host.place >= 0}
        assert places == {name: place for place, name in enumerate(state.placement)}
        rounds = state.recovery.rounds if state.recovery is not None else None
        assert rounds is None or state.phase == "checking", "nobody is tested with others outside a recovery"
        assert not state.peer_tests or rounds is not None
        limits = [check.deadline_s for check in state.checks.values()]
        assert (state.checks_due_s is None) == (not limits)
        assert state.checks_due_s is None or state.checks_due_s <= min(limits)

    def _seen(self, event: ev.Event) -> tuple[int, ...]:
        return (event.attempt,) if isinstance(event, ev.HostJoined) else (0,)

    def _follow_ranks(self, before: State, event: ev.Event, after: State, actions: list[act.Action]) -> None:
        """Nobody gets ranks of an attempt while a host may still have ranks of one before."""
        if isinstance(event, ev.Stopped) and event.attempt >= self.alive.get(event.host, 0):
            self.alive.pop(event.host, None)
        if isinstance(event, ev.HostGone):
            self.alive.pop(event.host, None)
        for action in actions:
            if isinstance(action, act.Evict | act.Release):
                self.alive.pop(action.host, None)
            if isinstance(action, act.OpenStore | act.Start | act.Gather):
                assert action.attempt == after.attempt
            if isinstance(action, act.Stop):  # of the attempt before, where the next one begins at once
                is_left = isinstance(event, ev.HostJoined) and event.running and action.hosts == (event.host,)
                assert action.attempt in (before.attempt, after.attempt, event.attempt if is_left else 0)  # type: ignore[union-attr]
            if isinstance(action, act.Start):
                assert all(attempt == action.attempt for attempt in self.alive.values())
                assert not any(after.hosts[name].state == "evicted" for name in action.hosts)
                assert len(set(action.placement)) == len(action.placement)
                assert len(action.placement) in self.job.sizes()
                self.alive |= dict.fromkeys(action.hosts, action.attempt)

    def _count_restarts(self, before: State, event: ev.Event, after: State, actions: list[act.Action]) -> None:
        if isinstance(
            event, ev.DrainAsked | ev.EvictAsked | ev.ReturnAsked | ev.StopAsked | ev.TimeShort | ev.SlowHost
        ):
            self.orders += 1
        if isinstance(event, ev.NoProgress) and event.kind == "hang":
            self.orders += 1  # it ends no job that it only stands still
        if after.progress.done > 0:
            self.opens = 0
        self.opens += after.attempt > before.attempt
        assert self.opens <= self.policy.max_restarts_without_step + 1 + self.orders, "it restarts for ever"

    def answer_all(self) -> None:
        """From now on all goes well: what was ordered last is answered, and time passes."""
        self.feed(ev.DriverRestarted(self.now_s))
        for _ in range(400):
            if self._is_at_rest():
                return
            todo, self.todo = self.todo, []
            for action in todo:
                for event in self._answers(action):
                    self.feed(event)
            due_s = next_deadline(self.state)
            if not self.todo and due_s is not None:
                self.now_s = max(self.now_s, due_s)
                self.feed(ev.Tick(self.now_s))
            elif not self.todo and self.state.phase == "starting":
                self.feed(ev.Running(self.now_s, self.state.attempt, 1000))
        raise AssertionError(f"it comes to no rest: {self.state.phase} {self.state}")

    def _is_at_rest(self) -> bool:
        state = self.state
        if state.phase in ("running", "ended"):
            return state.recovery is None or state.policy.advise_only
        few = len(ready_hosts(state)) < state.job.hosts
        return state.phase == "waiting" and few and next_deadline(state) is None

    def _answers(self, action: act.Action) -> list[ev.Event]:
        now_s = self.now_s
        match action:
            case act.OpenStore():
                return [ev.StoreOpened(now_s, action.attempt, 29500)]
            case act.Start():
                started: list[ev.Event] = [ev.Started(now_s, action.attempt, host) for host in action.hosts]
                return [*started, ev.Running(now_s, action.attempt, 1000)]
            case act.Stop():
                return [ev.Stopped(now_s, action.attempt, host) for host in action.hosts]
            case act.Gather():
                return [ev.SuspectsNamed(now_s, action.attempt)]
            case act.Check():
                bad = {peer: "timed out" for peer in action.peers if {peer, action.host} & self.links}
                if bad:
                    return [ev.CheckFailed(now_s, action.host, action.number, "", bad, {}, True)]
                return [ev.CheckPassed(now_s, action.host, action.number, {}, dict.fromkeys(action.peers, 9e9))]
        return []


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(
    policies,
    jobs,
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0, 20.0, -5.0]), drafts(), st.booleans()), max_size=60),
    st.one_of(_NONE, _ENDS),
)
def test_no_order_of_events_breaks_what_must_hold_and_with_answers_it_comes_to_rest(policy, job, plan, end):
    watcher = Watcher(policy, job)
    watcher.feed(ev.JobBegun(0.0))
    for name in NAMES[: job.hosts]:
        watcher.feed(ev.HostJoined(0.0, name))
    for passes_s, draft, is_answered in plan:
        watcher.now_s += passes_s
        if is_answered:  # so that later phases are reached too
            _answer_some(watcher)
        watcher.feed(watcher.event(draft))
    if end is not None:
        watcher.feed(watcher.event(end))
    watcher.now_s = watcher.state.now_s
    watcher.answer_all()
    assert replay(policy, job, watcher.journal) == watcher.state
    assert msgspec.json.decode(to_json(watcher.state), type=State) == watcher.state
    assert [event_from_json(to_json(event)) for event in watcher.journal] == watcher.journal


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
@given(
    st.integers(2, 5),
    st.sampled_from(["wait", "shrink"]),
    st.sets(st.sampled_from(NAMES), max_size=2),
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 40.0]), st.integers(0, 6), drafts()), max_size=25),
    st.one_of(_NONE, _ENDS),
)
def test_no_order_of_events_breaks_tests_between_hosts(hosts, missing, links, plan, end):
    watcher = Watcher(Policy(when_missing=missing, replace_wait_s=5.0, give_up_s=50.0), Job("j", hosts))
    watcher.feed(ev.JobBegun(0.0))
    for name in NAMES:
        watcher.feed(ev.HostJoined(0.0, name))
    for attempt in (1, 2):  # twice nobody stands out
        while watcher.state.phase != "running":
            _answer_some(watcher)
        watcher.feed(ev.NoProgress(watcher.now_s, attempt, 9.0, 5.0))
        while watcher.state.phase in ("diagnosing", "stopping"):
            _answer_some(watcher)
    assert watcher.state.recovery is not None and watcher.state.recovery.rounds is not None
    watcher.links = links
    for passes_s, count, draft in plan:
        for _ in range(count):
            if watcher.todo:
                todo = watcher.todo.pop(0)
                for event in watcher._answers(todo):
                    watcher.feed(event)
        watcher.now_s += passes_s
        watcher.feed(watcher.event(draft))
    if end is not None:
        watcher.feed(watcher.event(end))
    watcher.now_s = watcher.state.now_s
    watcher.answer_all()
    assert replay(watcher.policy, watcher.job, watcher.journal) == watcher.state
    assert msgspec.json.decode(to_json(watcher.state), type=State) == watcher.state
    assert [event_from_json(to_json(event)) for event in watcher.journal] == watcher.journal


def _answer_some(watcher: Watcher) -> None:
    todo, watcher.todo = watcher.todo, []
    for action in todo:
        assert msgspec.json.decode(to_json(action), type=act.Action) == action
        for event in watcher._answers(action):
            watcher.feed(event)


faults = st.tuples(
    st.sampled_from(["kill", "throw", "hang", "lose", "lose silently", "cut", "reconnect", "driver", "bring", "mute"]),
    st.integers(0, 9),
    st.sampled_from([0.0, 0.05, 0.3, 2.0, 30.0]),
)


@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(st.lists(faults, max_size=12), st.sampled_from(["wait", "shrink"]), st.booleans(), st.booleans())
def test_whatever_happens_in_the_world_the_job_runs_waits_for_hosts_or_has_ended(plan, missing, named, absolute):
    policy = Policy(when_missing=missing, replace_wait_s=20, give_up_s=300)
    speeds = Speeds(step=1.0)
    world = World(Job("j", 4, 2, 1), policy, pool=["x", "y"], speeds=speeds, names_suspects=named, is_absolute=absolute)
    world.run_for(3.2)
    for what, which, passes_s in plan:
        strike(world, what, which)
        world.run_for(passes_s)
    if not world.has_driver:
        world.restart_driver()
    for name, host in list(world.hosts.items()):
        host.mute = set()
        if host.is_cut:
            world.reconnect(name)
    world.run_for(1500)
    assert world.state.phase in ("running", "ended"), world.state
    assert replay(policy, world.job, world.journal) == world.state
    attempts = [a.attempt for a in world.taken("OpenStore") if isinstance(a, act.OpenStore)]
    assert all(first <= second for first, second in pairwise(attempts))
    assert not any(world.hosts[n].ranks for n, h in world.state.hosts.items() if h.state in ("evicted", "spare"))
    if ended(world):
        assert not any(host.ranks for host in world.hosts.values())


def strike(world: World, what: str, which: int) -> None:
    """Do one bad thing, if there is something to do it to."""
    names = sorted(world.hosts)
    name = names[which % len(names)]
    rank = which % max(1, world.state.world_size)
    if what == "driver":
        world.restart_driver() if not world.has_driver else world.stop_driver()
    elif what == "reconnect" or what == "bring":
        if world.hosts[name].is_cut:
            world.reconnect(name)
        elif not world.hosts[name].is_alive:
            world.bring(name)
    elif what == "cut":
        world.cut(name)
    elif what == "mute":
        world.hosts[name].mute = {"Start", "Check"}
    elif what.startswith("lose"):
        world.lose_host(name, "" if "silently" in what else "power")
    elif world.state.phase == "running":
        {"kill": world.kill, "throw": lambda rank: world.throw([rank]), "hang": world.hang}[what](rank)


@given(st.integers(0, 30), st.integers(1, 16), st.data())
def test_a_host_keeps_its_place_and_nobody_has_two(count, size, data):
    from phalanx.run.decide.attempts import place
    from phalanx.run.decide.state import Host

    assume(count >= size)
    hosts = {f"h{i}": Host(data.draw(st.sampled_from(["", "r1", "r2"])), "spare") for i in range(count)}
    ready = sorted(hosts, key=lambda name: (hosts[name].rack, name))
    before = place((), ready, size, hosts)
    gone = set(data.draw(st.lists(st.sampled_from(ready), max_size=count - size)))
    left = [name for name in ready if name not in gone]
    after = place(before, left, size, hosts)
    assert len(set(after)) == size and not gone & set(after)
    assert all(new == old for old, new in zip(before, after, strict=True) if old not in gone)


def _bad_start(watcher: Watcher, what: str) -> list[ev.Event]:
    """The present attempt goes wrong in this way before its first step."""
    now_s, attempt, host = watcher.now_s, watcher.state.attempt, watcher.state.placement[-1]
    match what:
        case "signal" | "raised":
            return [ev.WorkerFailed(now_s, attempt, 0, what, "process", f"{what} {attempt * 'x'}")]
        case "hang":
            return [ev.NoProgress(now_s, attempt, 9, 5, "stopped", "rank 0 is stopped", (0,))]
        case "still":
            return [ev.NoProgress(now_s, attempt, 9, 5, "hang", "nothing moves")]
        case "host":
            return [ev.WorkerFailed(now_s, attempt, 0, "status", "host", f"ECC {attempt * 'x'}")]
        case "start":
            return [ev.StartFailed(now_s, attempt, host, f"no {attempt * 'x'}")]
        case "gone":
            return [ev.HostGone(now_s, host, "power"), ev.HostJoined(now_s, host)]
    raise ValueError(what)


WAYS = st.sampled_from(["signal", "raised", "hang", "host", "start", "gone"])


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(policies, jobs, st.lists(WAYS, min_size=20, max_size=20))
def test_a_job_that_never_makes_a_step_ends_after_a_bounded_number_of_attempts(policy, job, ways):
    policy = msgspec.structs.replace(policy, advise_only=False)
    watcher = Watcher(policy, job)
    watcher.feed(ev.JobBegun(0.0))
    for name in NAMES[: job.hosts + job.spares]:
        watcher.feed(ev.HostJoined(0.0, name))
    pending = list(ways)
    for _ in range(2000):
        if watcher.state.phase == "ended":
            break
        _one_round(watcher, pending)
    few = len(ready_hosts(watcher.state)) < job.hosts
    assert watcher.state.phase == "ended" or (watcher.state.phase == "waiting" and few), watcher.state
    assert watcher.state.attempt <= policy.max_restarts_without_step + 1
    if watcher.state.phase == "ended":
        assert watcher.state.ending.status in (1, 2, 3, 4)


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(policies, jobs, st.integers(3, 30))
def test_a_job_that_only_stands_still_is_never_ended_for_that_and_gets_more_time_each_time(policy, job, times):
    policy = msgspec.structs.replace(policy, advise_only=False, max_restarts=0)
    watcher = Watcher(policy, job)
    watcher.feed(ev.JobBegun(0.0))
    for name in NAMES[: job.hosts + job.spares]:
        watcher.feed(ev.HostJoined(0.0, name))
    pending, rounds = ["still"] * times, 0
    while pending and rounds < 3000:
        _one_round(watcher, pending)
        rounds += 1
    state = watcher.state
    assert state.phase != "ended" and state.restarts.idle == 0 and not pending, state
    assert state.hangs.count == times and state.hangs.floor_s == 10.0, "twice the limit of the last alarm"
    assert not [host for host in state.hosts.values() if host.state == "evicted"]


def _one_round(watcher: Watcher, pending: list[str]) -> None:
    """Answer what was ordered, but for the first step; then strike; then let time pass."""
    if watcher.todo:
        todo, watcher.todo = watcher.todo, []
        answers = [event for action in todo for event in watcher._answers(action) if not isinstance(event, ev.Running)]
        for event in answers:
            watcher.feed(event)
    elif watcher.state.phase == "starting" and pending:
        for event in _bad_start(watcher, pending.pop(0)):
            watcher.feed(event)
    elif (due_s := next_deadline(watcher.state)) is not None:
        watcher.now_s = max(watcher.now_s, due_s)
        watcher.feed(ev.Tick(watcher.now_s))
