"""The driver's decisions: `decide(state, event) → (state, actions)`, a pure function.

An event changes what is known; then limits that have passed are acted upon; then the job goes from phase to phase as
far as it can without hearing anything else.

What hosts do is answered here too: they come, are checked, are not heard of, and go; and so are log rules' findings and
executors' words on the script. States, events and actions have a form in JSON, and a journal's events give the state
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from phalanx.run.decide import attempts, escalation, fault_attribution, host_checks, recovery, transition
from phalanx.run.decide.actions import Action, Check, Evict, Gather, OpenStore, Release, Stop, Where
from phalanx.run.decide.escalation import would_do
from phalanx.run.decide.events import (
    Advanced,
    CheckFailed,
    CheckPassed,
    DrainAsked,
    DriverRestarted,
    Event,
    EvictAsked,
    HostGone,
    HostJoined,
    HostUnknown,
    JobBegun,
    LeftEarly,
    LossBroken,
    NoProgress,
    Noticed,
    Restored,
    ReturnAsked,
    Running,
    SlowHost,
    Started,
    StartFailed,
    StopAsked,
    Stopped,
    StoreFailed,
    StoreOpened,
    SuspectsNamed,
    Tick,
    TimeShort,
    TrafficSilent,
    Unprepared,
    WorkerFailed,
    WorkersReturned,
)
from phalanx.run.decide.fault_attribution import OF_THE_HOST
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import Ending, Failure, Host, State, initial
from phalanx.run.decide.transition import Own, Turn


def on_noticed(turn: Turn, event: Noticed) -> None:
    """A log rule has matched. By itself that stops nothing; it counts when something else goes wrong."""
    state, is_kernel = turn.state, event.rank < 0
    if event.host not in state.hosts:
        return
    who = "the kernel" if is_kernel else f"rank {event.rank}"
    text = f"{who} says: {event.text} ({event.rule})"
    turn.note("log rules", f"{event.host}: {text}", Where(event.host, event.rank))
    if state.incident is None or not event.is_fatal:
        turn.alert("error" if event.is_fatal else "warning", text, event.host)
    known = state.recovery
    is_blamed = event.is_fatal and is_kernel and event.fault in OF_THE_HOST
    if is_blamed and known is not None and state.phase in ("diagnosing", "stopping") and state.has_place(event.host):
        turn.learn(suspects={**known.suspects, event.host: text})


def on_unprepared(turn: Turn, event: Unprepared) -> None:
    """A host cannot run the script: with most others the script is wrong, alone the host is."""
    state, name = turn.state, event.host
    host = state.hosts.get(name)
    if state.ending is not None or host is None or host.state in ("evicted", "gone"):
        return
    if event.is_common:
        if fault_attribution.has_never_run(state):
            attempts.end(turn, Ending(transition.BAD_INPUT, f"bad input: {event.problem}"), 0.0)
    elif state.has_workers and state.has_place(name):
        recovery.on_start_failed(turn, StartFailed(event.at_s, state.attempt, name, event.problem))
    else:
        why = f"it cannot run the script, which others can: {event.problem}"
        turn.note(f"executor of {name}", why, Where(name))
        turn.alert("error", f"{why}; it is evicted", name)
        turn.evict(name, why)


def on_joined(turn: Turn, event: HostJoined) -> None:
    """An executor has connected, for the first time or again."""
    state, name = turn.state, event.host
    if event.attempt > state.highest_seen:
        turn.set(highest_seen=event.attempt)
    known = state.hosts.get(name)
    if known is not None and known.state == "evicted":
        turn.act(Evict(name, known.why))
        return
    if name in state.checks:
        _ask_again(turn, name)
    elif known is not None and known.state != "gone" and state.has_workers and state.has_place(name):
        _come_back(turn, event, known)
    elif known is not None and known.state in ("spare", "active", "draining"):
        _end_leftovers(turn, event)
    else:
        _admit(turn, event, known)


def _admit(turn: Turn, event: HostJoined, known: Host | None) -> None:
    """A host that is new, or was away: it has to pass a check first."""
    was_away = known is not None and known.state == "unknown"
    changes = {
        "leaves": known.leaves if known is not None else "",
        "is_proven": known is not None and was_away and known.is_proven,
    }
    turn.set_host(event.host, rack=event.rack, state="joining", why="being checked", **changes)
    _end_leftovers(turn, event)
    host_checks.ask(turn, event.host, "passive" if was_away else turn.state.policy.joining_check)


def _end_leftovers(turn: Turn, event: HostJoined) -> None:
    """What runs there belongs to an attempt that this host has no part in; its executor refuses lower numbers."""
    if event.running:
        turn.act(Stop(max(turn.state.attempt, event.attempt), (event.host,)))


def _ask_again(turn: Turn, name: str) -> None:
    """It may never have heard of the check that it is asked for."""
    state = turn.state
    if state.hosts[name].state == "unknown":
        turn.set_host(name, state="suspect" if name in state.awaited else "joining", why="being checked")
    check = state.checks[name]
    turn.act(Check(name, check.number, check.kind, check.peers))


def _come_back(turn: Turn, event: HostJoined, known: Host) -> None:
    """A host of the present attempt: tell it again what it may not have heard."""
    state, name = turn.state, event.host
    turn.set_host(name, state="draining" if known.leaves else "active", why="")
    if turn.limit_has_passed:  # what follows from that is told to all hosts that it concerns
        return
    if state.phase == "opening" and name == state.placement[0]:
        turn.act(OpenStore(state.attempt, name))
    elif state.phase == "starting" and name in state.awaited:
        turn.act(attempts.start(state, (name,)))
    elif state.phase == "stopping":
        turn.act(Stop(state.attempt, (name,), state.grace_s))
    elif event.attempt < state.attempt and state.phase != "opening":
        text = "its executor has come back without the workers of this attempt"
        recovery.of_host(turn, name, Failure(-1, "silent", "process", text), f"executor of {name}")
    elif state.phase == "diagnosing" and state.recovery is not None and state.recovery.cause == "hang":
        turn.act(Gather(state.attempt, (name,)))


def on_unknown(turn: Turn, event: HostUnknown) -> None:
    """Nothing is heard of a host: that alone is no reason to do anything, least of all while steps advance."""
    host = turn.state.hosts.get(event.host)
    if host is None or host.state in ("unknown", "evicted", "gone"):
        return
    turn.set_host(event.host, state="unknown", why="nothing has been heard of it for a while")
    turn.note("driver", f"nothing is heard of {event.host}", Where(event.host))
    if turn.state.has_place(event.host) and turn.state.phase in ("starting", "running"):
        turn.alert("warning", "nothing is heard of it; it stays in the job while steps advance", event.host)


def on_gone(turn: Turn, event: HostGone) -> None:
    """The back end says that a host is gone."""
    state, name = turn.state, event.host
    host = state.hosts.get(name)
    if host is None or host.state in ("evicted", "gone"):
        return
    why = f"gone: {event.why}" if event.why else "gone"
    takes_part = state.has_workers and state.has_place(name)
    turn.remove_host(name, "gone", why)
    text = f"{name} is {why}"
    if takes_part and state.ending is None and recovery.see(turn, "failure", "back end", text, Where(name)):
        recovery.add_lost(turn, name, why)
    elif not takes_part:
        turn.note("back end", text, Where(name))


def on_check_passed(turn: Turn, event: CheckPassed) -> None:
    """A host may take part."""
    state, name = turn.state, event.host
    check = state.checks.get(name)
    if check is None or check.number != event.number:
        return
    if not host_checks.takes(turn, event) and name in state.awaited:
        turn.note(f"{check.kind} check of {name}", "passed", Where(name))
    _may_take_part(turn, name)


def _may_take_part(turn: Turn, name: str) -> None:
    """Its check is over."""
    turn.drop_check(name)
    if name in turn.state.awaited:
        turn.no_longer_awaited(name)
        turn.set_host(name, state="draining" if turn.state.hosts[name].leaves else "active", why="")
    else:
        host_checks.passes(turn)
        turn.set_host(name, state="spare", why="ready")


def on_check_failed(turn: Turn, event: CheckFailed) -> None:
    """A host must not take part, unless it is the network between it and another that is bad."""
    state, name = turn.state, event.host
    check = state.checks.get(name)
    if check is None or check.number != event.number:
        return
    if event.is_between and host_checks.takes(turn, event):
        _may_take_part(turn, name)
        return
    why = f"it has not passed its {check.kind} check: {event.why}"
    if name not in state.awaited and state.policy.advise_only:
        turn.drop_check(name)
        turn.set_host(name, state="spare", why=why)
        turn.alert("warning", f"{why}; it would be evicted", name)
        return
    turn.note(f"{check.kind} check of {name}", f"not passed: {event.why}", Where(name))
    said = f"it has not passed its {check.kind} check"
    host_checks.fails(turn, name, why, said, is_of_recovery=name in state.awaited)


def are_late(turn: Turn, late: list[str]) -> None:
    """The limit of these hosts' checks has passed without an answer."""
    state = turn.state
    asked = dict.fromkeys(name for name in late if name in state.awaited and not state.checks[name].is_extended)
    if escalation.is_driver_cut_off(state, len(asked)):
        wait_s = state.policy.cut_off_s
        why = f"{len(asked)} of {len(state.placement)} hosts do not answer their checks"
        turn.alert("error", f"{why}; it may be the driver that is cut off: it waits {wait_s:.0f} s")
        turn.decided("no host is given back yet", f"{why}: a common cause")
        waits_s = dict.fromkeys(asked, wait_s)
    else:
        heard = [name for name in asked if _may_be_busy(turn, name)]
        waits_s = dict.fromkeys(heard, 2 * state.policy.quick_check_s)
        for name in heard:
            why = "its quick check is late, and its executor is heard of: it is asked again, with twice the time"
            turn.decided(f"{name} is not given back yet", why)
    for name, wait_s in waits_s.items():
        _wait_longer(turn, name, wait_s)
    for name in late:
        if name not in waits_s:
            not_checked(turn, name)


def _may_be_busy(turn: Turn, name: str) -> bool:
    """Whether an executor lives and only its measurement is late: seconds of work on a machine that others use too."""
    return turn.state.checks[name].kind == "quick" and turn.state.hosts[name].state != "unknown"


def _wait_longer(turn: Turn, name: str, wait_s: float) -> None:
    """Ask for the same check once more."""
    check = replace(turn.state.checks[name], deadline_s=turn.now_s + wait_s, is_extended=True)
    turn.await_check(name, check)
    turn.act(Check(name, check.number, check.kind, check.peers))


def not_checked(turn: Turn, name: str) -> None:
    """The limit of a check has passed without an answer."""
    state = turn.state
    why = f"it did not answer its {state.checks[name].kind} check in time"
    if state.policy.advise_only and name not in state.awaited:
        turn.drop_check(name)
        turn.alert("warning", f"{why}; it would be given back", name)
        return
    turn.decided(f"{name} is given back", why)
    turn.alert("warning", f"{why}; it is given back", name)
    turn.release(name, why)


def on_slow(turn: Turn, event: SlowHost) -> None:
    """A host is slower than the others: tell it, and replace it where the policy has it so."""
    state = turn.state
    host = state.hosts.get(event.host)
    if host is None or state.phase != "running" or not state.has_place(event.host) or host.leaves:
        return
    text = f"a step on it takes {event.factor:.2f} times as long as on the others. {event.why}".strip()
    policy = state.policy
    if not policy.replace_slow or event.factor < policy.slow_factor:
        turn.alert("warning", text, event.host)
    elif policy.advise_only:
        turn.alert("warning", f"{text}; it would be replaced", event.host)
    else:
        turn.alert("warning", f"{text}; it is replaced as soon as a spare is ready", event.host)
        turn.set_host(event.host, leaves=f"slow: {text}", state="draining" if host.state == "active" else host.state)


def on_joined_after_end(turn: Turn, event: HostJoined) -> None:
    """There is nothing to do for it any more."""
    turn.act(Release(event.host, "the job has ended"))


def decide(state: State, event: Event, own: Own | None = None) -> tuple[State, list[Action]]:
    """What an event changes, and what has to be done about it. Never raises for any event in any state.

    Args:
        state: from `initial`, or the one that the event before gave.
        event: what has happened.
        own: of the call before this, by whoever holds no state of earlier calls any more: with many hosts, copying what
            is known of each of them costs more than all else. Begin with an empty one. None: `state` stays as it is.

    Returns:
        The next state, and the actions in the order in which they are to be performed.
    """
    before, turn = state.phase, Turn(state, event.at_s, {} if own is None else own)
    _handle(turn, event)
    while turn.state.phase != "ended" and (_expire(turn) or _proceed(turn)):
        pass
    if turn.state.phase != "ended" and (
        turn.hosts_changed or isinstance(event, JobBegun) or before != turn.state.phase
    ):
        attempts.ask_for_missing(turn)
    return turn.state, turn.actions


def _handle(turn: Turn, event: Event) -> None:
    if turn.state.phase == "ended":
        if isinstance(event, HostJoined):
            on_joined_after_end(turn, event)
        elif isinstance(event, DriverRestarted):
            attempts.on_restarted(turn)
    elif getattr(event, "attempt", turn.state.attempt) == turn.state.attempt or isinstance(event, HostJoined):
        _ANSWERS[type(event)](turn, event)


def _nothing(turn: Turn, event: Event) -> None:
    """Time alone changes nothing by itself."""


def _begin(turn: Turn, event: JobBegun) -> None:
    if turn.state.began_s is None:
        turn.set(began_s=turn.now_s)


def _on_restarted(turn: Turn, event: DriverRestarted) -> None:
    attempts.on_restarted(turn)


_ANSWERS: dict[type, Callable[[Turn, Any], None]] = {
    JobBegun: _begin,
    Tick: _nothing,
    DriverRestarted: _on_restarted,
    HostJoined: on_joined,
    HostUnknown: on_unknown,
    HostGone: on_gone,
    CheckPassed: on_check_passed,
    CheckFailed: on_check_failed,
    SlowHost: on_slow,
    Unprepared: on_unprepared,
    Noticed: on_noticed,
    StoreOpened: attempts.on_store_opened,
    StoreFailed: recovery.on_store_failed,
    Started: attempts.on_started,
    StartFailed: recovery.on_start_failed,
    Restored: attempts.on_restored,
    Running: attempts.on_running,
    Advanced: attempts.on_advanced,
    WorkerFailed: recovery.on_worker_failed,
    LeftEarly: recovery.on_left_early,
    WorkersReturned: attempts.on_workers_returned,
    NoProgress: recovery.on_no_progress,
    TrafficSilent: recovery.on_traffic_silent,
    LossBroken: recovery.on_loss_broken,
    SuspectsNamed: recovery.on_suspects_named,
    Stopped: attempts.on_stopped,
    StopAsked: attempts.on_stop_asked,
    TimeShort: attempts.on_time_short,
    DrainAsked: attempts.on_drain_asked,
    EvictAsked: attempts.on_evict_asked,
    ReturnAsked: attempts.on_return_asked,
}


# Limits


def _expire(turn: Turn) -> bool:
    """Act upon limits that have passed; whether there were any."""
    state = turn.state
    late = turn.late_checks()
    if late:
        are_late(turn, late)
    if state.deadline_s is None or turn.now_s < state.deadline_s:
        return bool(late)
    turn.set(deadline_s=None)
    _PASSED[turn.state.phase](turn)
    return True


_PASSED: dict[str, Callable[[Turn], None]] = {
    "waiting": lambda turn: None,  # what can be done now is seen next
    "opening": attempts.not_opened,
    "starting": attempts.not_started,
    "running": lambda turn: None,
    "diagnosing": recovery.stop,
    "stopping": recovery.not_stopped,
    "checking": lambda turn: None,
}


# Phases


def _proceed(turn: Turn) -> bool:
    """Go on to the next phase if nothing else need be heard for it; whether it did."""
    return _STEPS[turn.state.phase](turn)


def _waiting(turn: Turn) -> bool:
    return attempts.begin_if_possible(turn)


def _opening(turn: Turn) -> bool:
    if turn.state.recovery is None:
        return False
    why = turn.state.recovery.why  # only where the policy advises: nothing runs that could be let go on
    transition.finish(
        turn, Ending(transition.NO_PROGRESS, f"the attempt could not begin, and the policy only advises: {why}")
    )
    return True


def _running(turn: Turn) -> bool:
    _advise_if_due(turn)
    if recovery.all_failed(turn.state):
        _end_of_all(turn)
        return True
    return turn.state.phase == "running" and attempts.restart_if_wished(turn)


def _diagnosing(turn: Turn) -> bool:
    if not recovery.is_settled(turn.state):
        return False
    recovery.stop(turn)
    return True


def _stopping(turn: Turn) -> bool:
    if not turn.state.awaited:
        recovery.conclude(turn)
        return True
    recovery.hurry(turn)
    return turn.state.deadline_s is not None and turn.now_s >= turn.state.deadline_s


def _checking(turn: Turn) -> bool:
    if turn.state.awaited:
        return False
    if host_checks.go_on(turn):
        return True
    recovery.let_leave(turn)
    recovery.wait(turn)
    return True


_STEPS: dict[str, Callable[[Turn], bool]] = {
    "waiting": _waiting,
    "opening": _opening,
    "starting": _running,
    "running": _running,
    "diagnosing": _diagnosing,
    "stopping": _stopping,
    "checking": _checking,
}


# Advice


def _advise_if_due(turn: Turn) -> None:
    """With a policy that only advises: say what would be done, once the culprit has spoken."""
    due_s, found = turn.state.advice_due_s, turn.state.recovery
    if due_s is None or found is None:
        return
    if turn.now_s >= due_s or found.cause == "hang" or recovery.is_settled(turn.state):
        turn.alert("error", f"{found.why}. It is not done, since the policy only advises: {would_do(turn.state)}")
        turn.learn(is_decided=True)


def _end_of_all(turn: Turn) -> None:
    """Nothing runs any more and nothing is to be done."""
    reason = "every rank has ended, and the policy only advises"
    transition.finish(turn, fault_attribution.verdict(turn.state) or Ending(transition.NO_PROGRESS, reason))


def to_json(value: State | Event | Action | Policy | Job) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(value)


def event_from_json(text: bytes | str) -> Event:
    """The event that `to_json` was given.

    Raises:
        msgspec.ValidationError: it is none.
        msgspec.DecodeError: it is no JSON.
    """
    event: Event = msgspec.json.decode(text, type=Event)
    return event


def action_from_json(text: bytes | str) -> Action:
    """The action that `to_json` was given; raises as `event_from_json`."""
    action: Action = msgspec.json.decode(text, type=Action)
    return action


def state_from_json(text: bytes | str) -> State:
    """The state that `to_json` was given; raises as `event_from_json`."""
    return msgspec.json.decode(text, type=State)


def replay(policy: Policy, job: Job, events: Iterable[Event]) -> State:
    """The state of a driver that reads its journal again."""
    state = initial(policy, job)
    for event in events:
        state, _ = decide(state, event)
    return state
