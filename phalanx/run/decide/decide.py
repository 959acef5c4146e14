"""The driver's decisions: `decide(state, event) → (state, actions)`, a pure function.

An event changes what is known; then limits that have passed are acted upon; then the job goes from phase to phase as
far as it can without hearing anything else.

States, events and actions as JSON, and the state that a journal's events give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from phalanx.run.decide import attempts, blame, host_checks, hosts, recovery, transition
from phalanx.run.decide.actions import Action
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
from phalanx.run.decide.policy import Job, Policy
from phalanx.run.decide.state import Ending, State, initial
from phalanx.run.decide.transition import Own, Turn


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
            hosts.on_joined_after_end(turn, event)
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
    HostJoined: hosts.on_joined,
    HostUnknown: hosts.on_unknown,
    HostGone: hosts.on_gone,
    CheckPassed: hosts.on_check_passed,
    CheckFailed: hosts.on_check_failed,
    SlowHost: hosts.on_slow,
    Unprepared: hosts.on_unprepared,
    Noticed: hosts.on_noticed,
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
        hosts.are_late(turn, late)
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
    transition.finish(turn, blame.verdict(turn.state) or Ending(transition.NO_PROGRESS, reason))


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
