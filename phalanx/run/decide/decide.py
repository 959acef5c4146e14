"""The driver's decisions: `decide(state, event) → (state, actions)`, a pure function.

An event changes what is known; then limits that have passed are acted upon; then the job goes from phase to phase as
far as it can without hearing anything else:

    waiting → opening → starting → running → diagnosing → stopping → checking → waiting …                 → ended

The answers to what hosts and people do are in this file, and those to a restart of the driver; an attempt's way to its
first step is in `attempts`, the way from a fault to the next attempt in `recovery`. States, events and actions have a
form in JSON, and applying a journal's events gives the state again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from phalanx.detect.detection import named
from phalanx.run.decide import actions, attempts, escalation, host_checks, recovery
from phalanx.run.decide.actions import (
    Action,
    AddToIncident,
    AskForHosts,
    Check,
    Evict,
    Finish,
    Gather,
    KeepDetection,
    OpenStore,
    Release,
    Stop,
    Where,
)
from phalanx.run.decide.events import (
    OF_THE_HOST,
    Advanced,
    CheckFailed,
    CheckPassed,
    Detected,
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
from phalanx.run.decide.state import MOST_DETECTIONS, Ending, Failure, Own, State, Turn, initial, ready_hosts

_HOUR_S = 3600.0


def decide(state: State, event: Event, own: Own | None = None) -> tuple[State, list[Action]]:
    """What an event changes, and what has to be done about it. Never raises for any event in any state.

    Args:
        state: from `initial`, or the one that the event before gave.
        own: of the call before this, by a caller that keeps no earlier state: with many hosts, copying what is known of
            each of them costs more than all else. Begin with an empty one. None: `state` stays as it is.

    Returns:
        The next state, and the actions in the order in which they are to be performed.
    """
    before, turn = state.phase, Turn(state, event.at_s, {} if own is None else own)
    if before == "ended":
        if isinstance(event, HostJoined):
            turn.act(Release(event.host, "the job has ended"))
        elif isinstance(event, DriverRestarted):
            _on_restarted(turn, event)
        elif isinstance(event, Detected):  # why it has ended may be found afterwards
            _on_detected(turn, event)
    # What belongs to another attempt than the present one was on its way for too long, and changes nothing.
    elif getattr(event, "attempt", state.attempt) == state.attempt or isinstance(event, HostJoined):
        _ANSWERS[type(event)](turn, event)
    # Until nothing more follows: a phase that need not wait for anything is left at once.
    while turn.state.phase != "ended" and (_expire(turn) or _PROCEED[turn.state.phase](turn)):
        pass
    has_changed = turn.hosts_changed or isinstance(event, JobBegun) or before != turn.state.phase
    if turn.state.phase != "ended" and has_changed:
        attempts.ask_for_missing(turn)
    return turn.state, turn.actions


# Phases


def _expire(turn: Turn) -> bool:
    """Act upon limits that have passed; whether there were any."""
    were_late = host_checks.act_on_late(turn)
    state = turn.state
    if state.deadline_s is None or turn.now_s < state.deadline_s:
        return were_late
    turn.set(deadline_s=None)
    if (act := _LATE.get(state.phase)) is not None:
        act(turn)
    return True


_LATE: dict[str, Callable[[Turn], None]] = {
    "opening": recovery.on_not_opened,
    "starting": recovery.on_not_started,
    "diagnosing": recovery.stop,
    "stopping": recovery.on_not_stopped,
}
"""What to do when a phase has lasted to its limit; in the others, what can be done now is seen next."""


def _proceed_opening(turn: Turn) -> bool:
    if turn.state.recovery is None:
        return False
    # Only where the policy advises: nothing runs that could be let go on.
    why = f"the attempt could not begin, and the policy only advises: {turn.state.recovery.why}"
    turn.finish(Ending(actions.NO_PROGRESS, why))
    return True


def _proceed_running(turn: Turn) -> bool:
    state, found = turn.state, turn.state.recovery
    # A policy that only advises reports what would be done, once the cause is known.
    due_s = state.advice_due_s
    is_known = found is not None and (found.cause == "hang" or recovery.is_settled(state))
    if found is not None and due_s is not None and (is_known or turn.now_s >= due_s):
        ending = escalation.verdict_on_code(state)
        ending = ending or escalation.verdict_on_restarts(state.policy, escalation.restarts_after(state))
        if ending is not None:
            advice = f"all workers would be stopped and the job ended with status {ending.status}: {ending.reason}"
        else:
            first = "evidence would be gathered, then " if found.cause == "hang" else ""
            plan = escalation.plan_recovery(state, found)
            advice = f"{first}all workers would be stopped, and then: {plan.what} ({plan.why})"
        turn.alert("error", f"{found.why}. It is not done, since the policy only advises: {advice}")
        turn.learn(is_decided=True)
    if recovery.have_all_failed(turn.state):
        reason = "every rank has ended, and the policy only advises"
        turn.finish(escalation.verdict_on_code(turn.state) or Ending(actions.NO_PROGRESS, reason))
        return True
    return state.phase == "running" and _restart_on_purpose(turn)


def _restart_on_purpose(turn: Turn) -> bool:
    """Restart because a host that is to leave can be replaced, or a job that has shrunk can grow."""
    state, progress = turn.state, turn.state.progress
    replaceable = [host for host in state.leaving if state.has_place(host)]
    may_grow = state.policy.grow and len(state.placement) < state.job.hosts and not state.policy.advise_only
    if not replaceable and not may_grow:
        return False
    spares = [host for host in ready_hosts(state) if not state.has_place(host)]
    if replaceable and spares:
        text = f"{spares[0]} can take the place of {replaceable[0]}: {state.hosts[replaceable[0]].leaves}"
        return recovery.see(turn, "planned", "driver", text)
    # A restart loses the steps since the last checkpoint, so the attempt must have been worth its start.
    has_stepped = progress.is_new if progress.is_absolute else progress.done > 0
    if not may_grow or not has_stepped:
        return False
    working = [host for host in state.placement if state.hosts[host].state == "active"]
    size = next((size for size in state.job.sizes() if size <= len(working) + len(spares)), 0)
    if size <= len(state.placement) or len(working) < len(state.placement):
        return False
    text = f"there are hosts to go on with {size} instead of {len(state.placement)}"
    return recovery.see(turn, "planned", "driver", text)


def _proceed_diagnosing(turn: Turn) -> bool:
    if not recovery.is_settled(turn.state):
        return False
    recovery.stop(turn)
    return True


_PROCEED: dict[str, Callable[[Turn], bool]] = {
    "waiting": attempts.begin_if_possible,
    "opening": _proceed_opening,
    "starting": _proceed_running,
    "running": _proceed_running,
    "diagnosing": _proceed_diagnosing,
    "stopping": recovery.proceed_stopping,
    "checking": recovery.proceed_checking,
}
"""Go on to the next phase if nothing else need be heard for it; whether it did."""


# Hosts


def _on_joined(turn: Turn, event: HostJoined) -> None:
    """An executor has connected, for the first time or again."""
    state, name = turn.state, event.host
    if event.attempt > state.highest_seen:
        turn.set(highest_seen=event.attempt)
    known = state.hosts.get(name)
    if known is not None and known.state == "evicted":
        turn.act(Evict(name, known.why))
        return
    if name in state.checks:  # its executor may never have heard of the check
        if state.hosts[name].state == "unknown":
            turn.set_host(name, state="suspect" if name in state.awaited else "joining", why="being checked")
        check = state.checks[name]
        turn.act(Check(name, check.number, check.kind, check.peers))
        return
    if known is not None and known.state != "gone" and state.has_workers and state.has_place(name):
        turn.set_host(name, state="draining" if known.leaves else "active", why="")
        _repeat_orders(turn, event)
        return
    is_new = known is None or known.state not in ("spare", "active", "draining")
    was_away = known is not None and known.state == "unknown"
    if is_new:
        leaves = known.leaves if known is not None else ""
        is_proven = known is not None and was_away and known.is_proven
        turn.set_host(name, rack=event.rack, state="joining", why="being checked", leaves=leaves, is_proven=is_proven)
    # What runs there belongs to an attempt that this host has no part in; its executor refuses lower numbers.
    if event.running:
        turn.act(Stop(max(turn.state.attempt, event.attempt), (name,)))
    if is_new:  # it has to pass a check before it may take part
        host_checks.ask(turn, name, "passive" if was_away else turn.state.policy.joining_check)


def _repeat_orders(turn: Turn, event: HostJoined) -> None:
    """A host of the present attempt is back: it may not have heard what it was told last."""
    state, name = turn.state, event.host
    if state.deadline_s is not None and turn.now_s >= state.deadline_s:
        return  # the phase is over, and what follows from that goes to all hosts that it concerns
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


def _on_unknown(turn: Turn, event: HostUnknown) -> None:
    """Nothing is heard of a host: that alone is no reason to do anything, least of all while steps advance."""
    host = turn.state.hosts.get(event.host)
    if host is None or host.state in ("unknown", "evicted", "gone"):
        return
    turn.set_host(event.host, state="unknown", why="nothing has been heard of it for a while")
    turn.note("driver", f"nothing is heard of {event.host}", Where(event.host))
    if turn.state.has_place(event.host) and turn.state.phase in ("starting", "running"):
        turn.alert("warning", "nothing is heard of it; it stays in the job while steps advance", event.host)


def _on_gone(turn: Turn, event: HostGone) -> None:
    """The back end reports that a host is gone."""
    state, name = turn.state, event.host
    host = state.hosts.get(name)
    if host is None or host.state in ("evicted", "gone"):
        return
    why = f"gone: {event.why}" if event.why else "gone"
    # The back end knows, unlike silence: this ends the attempt at once, without waiting for a limit.
    takes_part = state.has_workers and state.has_place(name)
    turn.remove_host(name, "gone", why)
    text = f"{name} is {why}"
    if takes_part and state.ending is None and recovery.see(turn, "failure", "back end", text, Where(name)):
        recovery.add_lost(turn, name, why)
    elif not takes_part:
        turn.note("back end", text, Where(name))


def _on_noticed(turn: Turn, event: Noticed) -> None:
    """A log rule has matched. By itself that stops nothing; it counts when something else goes wrong."""
    state, is_kernel = turn.state, event.rank < 0
    if event.host not in state.hosts:
        return
    text = f"{'the kernel' if is_kernel else f'rank {event.rank}'} says: {event.text} ({event.rule})"
    turn.note("log rules", f"{event.host}: {text}", Where(event.host, event.rank))
    if state.incident is None or not event.is_fatal:
        turn.alert("error" if event.is_fatal else "warning", text, event.host)
    known = state.recovery
    is_blamed = event.is_fatal and is_kernel and event.fault in OF_THE_HOST
    if is_blamed and known is not None and state.phase in ("diagnosing", "stopping") and state.has_place(event.host):
        turn.learn(suspects={**known.suspects, event.host: text})


def _on_unprepared(turn: Turn, event: Unprepared) -> None:
    """A host cannot run the script: with most others the script is wrong, alone the host is."""
    state, name = turn.state, event.host
    host = state.hosts.get(name)
    if state.ending is not None or host is None or host.state in ("evicted", "gone"):
        return
    if event.is_common:
        if not state.progress.has_run:
            _end(turn, Ending(actions.BAD_INPUT, f"bad input: {event.problem}"), 0.0)
    elif state.has_workers and state.has_place(name):
        recovery.on_start_failed(turn, StartFailed(event.at_s, state.attempt, name, event.problem))
    else:
        why = f"it cannot run the script, which others can: {event.problem}"
        turn.note(f"executor of {name}", why, Where(name))
        turn.alert("error", f"{why}; it is evicted", name)
        turn.evict(name, why)


def _on_slow(turn: Turn, event: SlowHost) -> None:
    """A host is slower than the others: report it, and replace it if the policy asks for that."""
    state = turn.state
    host = state.hosts.get(event.host)
    if host is None or state.phase != "running" or not state.has_place(event.host) or host.leaves:
        return
    text = f"a step on it takes {event.factor:.2f} times as long as on the others. {event.why}".strip()
    _tell_slow(turn, event.host, event.factor, text)


def _tell_slow(turn: Turn, name: str, factor: float, text: str, advice: str = "") -> None:
    """Report a host that takes part and is slow, and have it replaced if the policy asks for that, else with advice."""
    policy = turn.state.policy
    if not policy.replace_slow or factor < policy.slow_factor:
        turn.alert("warning", f"{text}{advice}", name)
    else:
        _replace(turn, name, "slow", text)


def _tell_faulty(turn: Turn, name: str, text: str, advice: str) -> None:
    """The same of a host that takes part and is faulty by its metrics; of many in an hour the judge is doubted."""
    policy = turn.state.policy
    lately_s = tuple(at_s for at_s in turn.state.faulty_s if turn.now_s - at_s < _HOUR_S)
    if not policy.replace_faulty:
        turn.alert("warning", f"{text}{advice}", name)
    elif len(lately_s) >= policy.faulty_per_hour:
        stays = f"it stays, since {policy.faulty_per_hour} have had to leave within an hour (policy.faulty_per_hour)"
        turn.alert("error", f"{text}; {stays}: `phalanx run evict {name}` has it leave", name)
    else:
        if not policy.advise_only:
            turn.set(faulty_s=(*lately_s, turn.now_s))
        _replace(turn, name, "faulty", text)


def _replace(turn: Turn, name: str, what: str, text: str) -> None:
    """Have a host leave for a spare, which the alert says first."""
    host = turn.state.hosts[name]
    if turn.state.policy.advise_only:
        turn.alert("warning", f"{text}; it would be replaced", name)
        return
    # It makes steps still: no restart is worth it before another host can take its place at once.
    turn.alert("warning", f"{text}; it is replaced as soon as a spare is ready", name)
    turn.set_host(name, leaves=f"{what}: {text}", state="draining" if host.state == "active" else host.state)


def _on_detected(turn: Turn, event: Detected) -> None:
    """A judge has found something: keep it, and tell people once. What it advises is done only by a policy that asks
    for acts of that kind: `replace_slow`, `replace_faulty`."""
    state, found = turn.state, event.found
    number = state.detection_count + 1
    kept = KeepDetection(number, turn.now_s, state.attempt, event.judge, found, event.incident)
    turn.set(detections=(*state.detections, kept)[-MOST_DETECTIONS:], detection_count=number)
    turn.act(kept)
    if event.is_told:
        return
    hosts, ranks = named(found, "hosts"), named(found, "ranks")
    host = hosts[0] if len(hosts) == 1 else ""
    if event.incident:
        where = Where(host, ranks[0] if len(ranks) == 1 else -1)
        turn.act(AddToIncident(event.incident, f"judge of {event.judge}", found.sentence, where))
        return
    advice = f". What to do: {found.then[0]}" if found.then else ""
    is_here = state.phase == "running" and state.has_place(host) and not state.hosts[host].leaves
    judge = event.judge if found.advice == "evict" and is_here else ""
    slowdown = found.figures.get("slowdown", 1.0) if judge == "stragglers" else 1.0
    if isinstance(slowdown, int | float) and slowdown > 1.0:
        _tell_slow(turn, host, slowdown, found.sentence, advice)
    elif judge == "machines":
        _tell_faulty(turn, host, found.sentence, advice)
    else:
        turn.alert("info" if found.advice in ("none", "watch") else "warning", f"{found.sentence}{advice}", host)


# People, and the back end's clock


def _on_stop_asked(turn: Turn, event: StopAsked) -> None:
    """A person ends the job; asked again, sooner."""
    state = turn.state
    is_again = state.ending is not None and state.phase == "stopping"
    grace_s = 0.0 if is_again else state.policy.grace_s
    if event.grace_s is not None:  # infinity or NaN would make a limit that never passes
        grace_s = event.grace_s if 0 < event.grace_s < float("inf") else 0.0
    if is_again and state.ending is not None:
        turn.set(ending=replace(state.ending, grace_s=grace_s))
        turn.enter("stopping", grace_s + state.policy.stop_s, awaited=state.awaited)
        turn.act(Stop(state.attempt, tuple(state.awaited), grace_s))
    else:
        _end(turn, Ending(actions.STOPPED, f"stopped by {event.who or 'a person'}", by_person=True), grace_s)


def _on_time_short(turn: Turn, event: TimeShort) -> None:
    """The back end will end the job soon: stop while there is time to save."""
    if turn.state.ending is None:
        # Half of what is left: killing what does not end in time, and telling everybody, need some too.
        grace_s = max(0.0, min(turn.state.policy.grace_s, event.left_s / 2))
        reason = f"only {event.left_s:.0f} s of its time were left"
        _end(turn, Ending(actions.TIME_SHORT, reason, requeue=True), grace_s)


def _end(turn: Turn, ending: Ending, grace_s: float) -> None:
    """Stop what runs, and then end so."""
    phase = turn.state.phase
    turn.decided("the job ends", ending.reason)
    if phase in ("waiting", "checking"):
        turn.finish(ending)
        return
    turn.set(ending=replace(ending, grace_s=grace_s))
    if phase != "stopping":  # a recovery that stops its workers already goes on doing so
        recovery.stop(turn, grace_s)


def _on_drain_asked(turn: Turn, event: DrainAsked) -> None:
    """A host leaves when another can take its place."""
    state, name = turn.state, event.host
    host = state.hosts.get(name)
    if host is None or host.state in ("evicted", "gone"):
        turn.alert("warning", f"{event.who or 'a person'} drains it, but it is no host of this job", name)
        return
    why = f"drained by {event.who or 'a person'}"
    # A host with ranks stays until it can be replaced: a drain must not cost the job its steps.
    if state.has_workers and state.has_place(name):
        turn.set_host(name, leaves=why, state="draining" if host.state == "active" else host.state)
        turn.alert("info", f"{why}: it leaves as soon as another can take its place", name)
    elif name in state.awaited or (host.state == "active" and not state.has_workers):
        turn.set_host(name, leaves=why)
    else:
        turn.release(name, why)


def _on_evict_asked(turn: Turn, event: EvictAsked) -> None:
    """A host leaves at once."""
    state, name = turn.state, event.host
    if name not in state.hosts:
        turn.alert("warning", f"{event.who or 'a person'} evicts it, but it is no host of this job", name)
        return
    why = f"evicted by {event.who or 'a person'}"
    if not state.has_workers or not state.has_place(name) or state.hosts[name].state in ("gone", "evicted"):
        turn.evict(name, why)
    elif state.ending is None and recovery.see(turn, "planned", event.who or "a person", f"{name} is to be evicted"):
        known = turn.state.recovery
        turn.learn(evict={**(known.evict if known else {}), name: why})


def _on_return_asked(turn: Turn, event: ReturnAsked) -> None:
    """A host that was evicted or is to be drained may stay."""
    host = turn.state.hosts.get(event.host)
    who = event.who or "a person"
    if host is None:
        turn.alert("warning", f"{who} lets it return, but it was never a host of this job", event.host)
    elif host.state == "evicted":
        # Its own faults are forgiven; those of its place stay, which may be of the code or of a link.
        turn.set_host(event.host, state="gone", why=f"may join again, says {who}", is_proven=False)
        turn.set(history={mark: times for mark, times in turn.state.history.items() if mark != f"host {event.host}"})
    elif host.leaves:
        turn.set_host(event.host, leaves="", state="active" if host.state == "draining" else host.state)


# The driver itself


def _on_begun(turn: Turn, event: JobBegun) -> None:
    if turn.state.began_s is None:
        turn.set(began_s=turn.now_s)


def _on_restarted(turn: Turn, event: DriverRestarted) -> None:
    """Repeat what the present state waits for; an attempt that runs is not disturbed."""
    state = turn.state
    ending = state.ending
    turn.act(*state.detections)
    if ending is not None and state.phase == "ended":
        if not ending.requeue:
            turn.act(Finish(ending.status, ending.reason, ending.requeue))
            return
        # A job that ended for want of time or hosts goes on, with whatever the back end gives now.
        for name, host in state.hosts.items():
            if host.state == "evicted":
                turn.act(Evict(name, host.why))
            elif host.state != "gone":
                turn.set_host(name, state="gone", why="the job had ended", leaves="")
        turn.set(ending=None)
        turn.enter("waiting")
        return
    turn.act(*(Evict(name, host.why) for name, host in state.hosts.items() if host.state == "evicted"))
    turn.act(AskForHosts(state.asked))
    # Limits begin again: nobody could answer a driver that was not there.
    limits_s = {
        "opening": state.policy.store_s,
        "starting": state.policy.start_s,
        "diagnosing": state.policy.evidence_s,
        "stopping": state.policy.stop_s + state.grace_s,
    }
    if state.deadline_s is not None and state.phase in limits_s:
        turn.enter(state.phase, limits_s[state.phase], state.awaited)
    if state.lacking_since_s is not None:
        turn.set(lacking_since_s=turn.now_s)
    turn.set(checks={}, checks_due_s=None)
    for name, check in state.checks.items():
        deadline_s = turn.now_s + host_checks.limit_s(state, check.kind)
        turn.await_check(name, replace(check, deadline_s=deadline_s, is_extended=False))
    # Commands whose answer is awaited: asked twice, executors answer twice and do it once.
    if state.phase == "opening":
        turn.act(OpenStore(state.attempt, state.placement[0]))
    elif state.phase == "starting" and state.awaited:
        turn.act(attempts.start(state, tuple(state.awaited)))
    elif state.phase == "diagnosing" and state.recovery is not None and state.recovery.cause == "hang":
        turn.act(Gather(state.attempt, tuple(h for h in state.placement if state.hosts[h].state != "gone")))
    elif state.phase == "stopping":
        turn.act(Stop(state.attempt, tuple(state.awaited), state.grace_s))
    turn.act(*(Check(name, check.number, check.kind, check.peers) for name, check in state.checks.items()))
    turn.note("driver", f"the driver was restarted in phase {state.phase}")


_ANSWERS: dict[type, Callable[[Turn, Any], None]] = {
    JobBegun: _on_begun,
    Tick: lambda turn, event: None,  # limits are looked at after every event
    DriverRestarted: _on_restarted,
    HostJoined: _on_joined,
    HostUnknown: _on_unknown,
    HostGone: _on_gone,
    CheckPassed: host_checks.on_check_passed,
    CheckFailed: host_checks.on_check_failed,
    SlowHost: _on_slow,
    Detected: _on_detected,
    Unprepared: _on_unprepared,
    Noticed: _on_noticed,
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
    StopAsked: _on_stop_asked,
    TimeShort: _on_time_short,
    DrainAsked: _on_drain_asked,
    EvictAsked: _on_evict_asked,
    ReturnAsked: _on_return_asked,
}


def to_json(value: State | Event | Action | Policy | Job) -> bytes:
    """One line of JSON."""
    return msgspec.json.encode(value)


def event_from_json(text: bytes | str) -> Event:
    """The event that `to_json` was given.

    Raises:
        msgspec.DecodeError: it is not.
    """
    event: Event = msgspec.json.decode(text, type=Event)
    return event


def replay(policy: Policy, job: Job, events: Iterable[Event]) -> State:
    """The state of a driver that reads its journal again."""
    state = initial(policy, job)
    for event in events:
        state, _ = decide(state, event)
    return state
