"""The way of an attempt from waiting for hosts to its first step, and what it does while it runs.

The driver has been restarted: what has to be performed again, whatever of it was performed before.

What people and the back end's clock order.
"""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.run.decide import escalation, recovery, transition
from phalanx.run.decide.actions import AskForHosts, Check, Evict, Finish, Gather, OpenStore, Start, Stop, Where
from phalanx.run.decide.events import (
    Advanced,
    DrainAsked,
    EvictAsked,
    Restored,
    ReturnAsked,
    Running,
    Started,
    StopAsked,
    Stopped,
    StoreOpened,
    TimeShort,
    WorkersReturned,
)
from phalanx.run.decide.state import (
    Ending,
    Failure,
    Recovery,
    State,
    count_ready,
    missing_hosts,
    place,
    ready_hosts,
    size_to_start,
)
from phalanx.run.decide.transition import Turn

# Waiting


def begin_if_possible(turn: Turn) -> bool:
    """Begin the next attempt, if there are hosts for it and no pause is due; else say until when to wait."""
    state = turn.state
    ready = count_ready(state)
    # A host that is to leave still serves as long as nothing can replace it.
    stopgap = [host for host in state.leaving if state.hosts[host].state in ("draining", "spare", "active")]
    lacks = ready + len(stopgap) < state.job.hosts
    if lacks != (state.lacking_since_s is not None):
        turn.set(lacking_since_s=turn.now_s if lacks else None)
    size = size_to_start(turn.state, ready) or size_to_start(turn.state, ready + len(stopgap))
    if not size and _has_given_up(turn.state):
        transition.finish(turn, _no_hosts(turn.state, ready))
        return True
    if not size or turn.now_s < state.brakes.not_before_s:
        turn.set(deadline_s=_wait_until(turn.state))
        return False
    chosen = ready_hosts(state)
    if ready < size:
        chosen = sorted([*chosen, *stopgap[: size - ready]], key=lambda name: (state.hosts[name].rack, name))
    _open(turn, place(state.placement, chosen, size, state.hosts))
    return True


def _has_given_up(state: State) -> bool:
    limit_s, since_s = state.policy.give_up_s, state.lacking_since_s
    return limit_s > 0 and since_s is not None and state.now_s >= since_s + limit_s


def _no_hosts(state: State, ready: int) -> Ending:
    waited_s = state.policy.give_up_s
    reason = f"only {ready} of {state.job.hosts} hosts were there after {waited_s:.0f} s (give_up_s)"
    return Ending(transition.NO_HOSTS, reason, requeue=True)


def _wait_until(state: State) -> float | None:
    """When something else can be decided without any other event."""
    times = [state.brakes.not_before_s]
    if state.lacking_since_s is not None:
        times.append(state.lacking_since_s + state.policy.replace_wait_s)
        times += [state.lacking_since_s + state.policy.give_up_s] if state.policy.give_up_s > 0 else []
    return min((time_s for time_s in times if time_s > state.now_s), default=None)


def _open(turn: Turn, placement: tuple[str, ...]) -> None:
    """Begin an attempt on these hosts: its store first."""
    state = turn.state
    chosen = {name: place for place, name in enumerate(placement)}
    for name, host in state.hosts.items():
        if (place := chosen.get(name)) is not None:
            turn.set_host(name, state="draining" if host.leaves else "active", why="", place=place)
        elif host.state == "active":
            turn.set_host(name, state="spare", why="ready", place=-1)
        elif host.place >= 0:
            turn.set_host(name, place=-1)
    attempt = max(state.attempt, state.highest_seen) + 1
    if state.placement and placement != state.placement:
        turn.decided(_moves(state.placement, placement), "these hosts are ready")
    turn.set(attempt=attempt, placement=placement, store_port=0, left={}, lacking_since_s=None)
    turn.set(progress=escalation.begun(state.progress, state.policy), highest_seen=attempt)
    turn.enter("opening", state.policy.store_s)
    turn.decided(f"attempt {attempt} begins on {escalation.names(placement)}", _ready(state, placement))
    turn.act(OpenStore(attempt, placement[0]))
    for leaver in turn.state.leaving:
        if leaver not in chosen:
            turn.release(leaver, turn.state.hosts[leaver].leaves)


def _ready(state: State, placement: tuple[str, ...]) -> str:
    count = len(placement)
    return f"{count} of {state.job.hosts} hosts are ready" if count < state.job.hosts else "its hosts are ready"


def _moves(before: tuple[str, ...], after: tuple[str, ...]) -> str:
    """Who takes whose place."""
    if len(before) != len(after):
        return f"{len(after)} hosts instead of {len(before)}"
    moves = [f"{new} takes the ranks of {old}" for old, new in zip(before, after, strict=True) if old != new]
    return escalation.names(moves)


def ask_for_missing(turn: Turn) -> None:
    """Have the back end bring what is missing, and say so only when it has changed."""
    if turn.state.policy.advise_only and turn.state.has_workers:
        return  # it would be for a host that was lost
    missing = missing_hosts(turn.state)
    if missing != turn.state.asked:
        turn.set(asked=missing)
        turn.act(AskForHosts(missing))


# Opening and starting


def on_store_opened(turn: Turn, event: StoreOpened) -> None:
    """The ranks can be started."""
    state = turn.state
    if state.phase != "opening":
        return
    turn.set(store_port=event.port)
    turn.enter("starting", state.policy.start_s, awaited=state.placement)
    turn.act(start(turn.state, state.placement))


def start(state: State, hosts: tuple[str, ...]) -> Start:
    """Start the ranks of these hosts."""
    per_host = state.job.workers_per_host
    return Start(state.attempt, hosts, state.placement, per_host, state.store_port, state.attempt - 1, state.version)


def on_started(turn: Turn, event: Started) -> None:
    """One host more has started its ranks; the first step is what the others are waited for now."""
    if turn.state.phase != "starting":
        return
    if len(turn.state.awaited) == 1 and event.host in turn.state.awaited:
        turn.all_started()
        turn.set(deadline_s=None)
    turn.no_longer_awaited(event.host)


def on_restored(turn: Turn, event: Restored) -> None:
    """It is known from where the attempt goes on, also of a script that does not number its steps."""
    if turn.state.phase in ("starting", "running", "diagnosing", "stopping"):
        turn.state = escalation.went_on_from(turn.state, event.step)
        turn.set(progress=replace(turn.state.progress, after=event.step))


def on_running(turn: Turn, event: Running) -> None:
    """The attempt has made its first step."""
    state = turn.state
    if state.phase != "starting":
        return
    for name in state.placement:
        if not state.hosts[name].is_proven:
            turn.set_host(name, is_proven=True)
    step = max(event.step, 0)
    turn.set(progress=escalation.advanced(state.progress, step, event.is_absolute, turn.now_s))
    if event.is_absolute:
        turn.state = escalation.went_on_from(turn.state, step - 1)
    first_step = event.step if event.is_absolute else -1
    turn.close_incident(f"attempt {state.attempt} makes steps", first_step)
    turn.enter("running")


def on_advanced(turn: Turn, event: Advanced) -> None:
    """Steps advance."""
    state = turn.state
    if state.phase not in ("running", "diagnosing", "stopping"):
        return
    progress = escalation.advanced(state.progress, event.step, event.is_absolute, turn.now_s - max(event.age_s, 0.0))
    is_new = progress.done > state.progress.done
    turn.set(progress=progress)
    found = state.recovery
    if state.phase == "diagnosing" and is_new and _is_only_hang(found):
        turn.set(recovery=None)
        turn.close_incident("steps advance again: nothing was done", result="false alarm")
        turn.enter("running")


def _is_only_hang(found: Recovery | None) -> bool:
    return found is not None and found.cause == "hang" and not found.failures and not found.lost


def on_workers_returned(turn: Turn, event: WorkersReturned) -> None:
    """All ranks have ended well."""
    state = turn.state
    if state.phase in ("starting", "running", "diagnosing") and not (state.recovery and state.recovery.failures):
        transition.finish(turn, Ending(transition.DONE, "every rank has returned"))


def on_stopped(turn: Turn, event: Stopped) -> None:
    """A host has nothing left of the attempt."""
    state = turn.state
    if state.phase != "stopping" or event.host not in state.awaited:
        return
    turn.no_longer_awaited(event.host)
    if not event.stuck:
        return
    why = f"processes {', '.join(map(str, event.stuck[:8]))} do not end"
    turn.note(f"executor of {event.host}", why, Where(event.host))
    turn.alert("error", f"{why}: the host has to be restarted", event.host)
    if state.recovery is not None:
        turn.learn(stuck={**state.recovery.stuck, event.host: why})


# Running


def restart_if_wished(turn: Turn) -> bool:
    """Restart on purpose: a host that is to leave can be replaced, or a job that has shrunk can grow."""
    state = turn.state
    replaceable = [host for host in state.leaving if state.has_place(host)]
    may_grow = state.policy.grow and len(state.placement) < state.job.hosts and not state.policy.advise_only
    if not replaceable and not may_grow:
        return False
    spares = [host for host in ready_hosts(state) if not state.has_place(host)]
    if replaceable and spares:
        host = replaceable[0]
        return recovery.see(
            turn, "planned", "driver", f"{spares[0]} can take the place of {host}: {state.hosts[host].leaves}"
        )
    if not may_grow or not escalation.may_restart(state.progress):
        return False
    working = [host for host in state.placement if state.hosts[host].state == "active"]
    size = next((size for size in state.job.sizes() if size <= len(working) + len(spares)), 0)
    if size <= len(state.placement) or len(working) < len(state.placement):
        return False
    return recovery.see(
        turn, "planned", "driver", f"there are hosts to go on with {size} instead of {len(state.placement)}"
    )


def not_started(turn: Turn) -> None:
    """The limit of a start has passed."""
    state = turn.state
    limit_s = state.policy.start_s
    for host in state.awaited:
        failure = Failure(-1, "silent", "process", f"did not say in {limit_s:.0f} s that its ranks are started")
        recovery.of_host(turn, host, failure, "driver")


def not_opened(turn: Turn) -> None:
    """The limit for the store has passed."""
    host, limit_s = turn.state.placement[0], turn.state.policy.store_s
    recovery.of_host(turn, host, Failure(-1, "silent", "process", f"opened no store in {limit_s:.0f} s"), "driver")


def on_restarted(turn: Turn) -> None:
    """Say again what the present state waits for; an attempt that runs is not disturbed."""
    state = turn.state
    if state.ending is not None and state.phase == "ended":
        if state.ending.requeue:
            _resume(turn, state)
        else:
            turn.act(Finish(state.ending.status, state.ending.reason, state.ending.requeue))
        return
    turn.act(*(Evict(name, host.why) for name, host in state.hosts.items() if host.state == "evicted"))
    turn.act(AskForHosts(state.asked))
    _wait_anew(turn)
    _phase_again(turn, state)
    turn.act(*(Check(name, check.number, check.kind, check.peers) for name, check in state.checks.items()))
    turn.note("driver", f"the driver was restarted in phase {state.phase}")


def _resume(turn: Turn, state: State) -> None:
    """A job that ended for want of time or hosts goes on, with whatever the back end gives now."""
    for name, host in state.hosts.items():
        if host.state == "evicted":
            turn.act(Evict(name, host.why))
        elif host.state != "gone":
            turn.set_host(name, state="gone", why="the job had ended", leaves="")
    turn.set(ending=None)
    turn.enter("waiting")


def _wait_anew(turn: Turn) -> None:
    """Limits begin again: nobody could answer a driver that was not there."""
    state = turn.state
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
    checks = state.checks
    turn.set(checks={}, checks_due_s=None)
    for name, check in checks.items():
        deadline_s = turn.now_s + state.policy.check_s(check.kind)
        turn.await_check(name, type(check)(check.number, check.kind, deadline_s, check.peers))


def _phase_again(turn: Turn, state: State) -> None:
    if state.phase == "opening":
        turn.act(OpenStore(state.attempt, state.placement[0]))
    elif state.phase == "starting" and state.awaited:
        turn.act(start(state, tuple(state.awaited)))
    elif state.phase == "diagnosing" and state.recovery is not None and state.recovery.cause == "hang":
        turn.act(Gather(state.attempt, tuple(h for h in state.placement if state.hosts[h].state != "gone")))
    elif state.phase == "stopping":
        turn.act(Stop(state.attempt, tuple(state.awaited), state.grace_s))


def on_stop_asked(turn: Turn, event: StopAsked) -> None:
    """A person ends the job; asked again, sooner."""
    state = turn.state
    if state.ending is not None and state.phase == "stopping":
        grace_s = _given(event, 0.0)
        turn.set(ending=replace(state.ending, grace_s=grace_s))
        turn.enter("stopping", grace_s + state.policy.stop_s, awaited=state.awaited)
        turn.act(Stop(state.attempt, tuple(state.awaited), grace_s))
        return
    stopped = Ending(transition.STOPPED, f"stopped by {event.who or 'a person'}", by_person=True)
    end(turn, stopped, _given(event, state.policy.grace_s))


def _given(event: StopAsked, usual_s: float) -> float:
    """The grace that a person gives; nothing that is no time makes a limit that never passes."""
    if event.grace_s is None:
        return usual_s
    return event.grace_s if 0 < event.grace_s < float("inf") else 0.0


def on_time_short(turn: Turn, event: TimeShort) -> None:
    """The back end will end the job soon: stop while there is time to save."""
    if turn.state.ending is not None:
        return
    grace_s = max(0.0, min(turn.state.policy.grace_s, event.left_s / 2))
    reason = f"only {event.left_s:.0f} s of its time were left"
    end(turn, Ending(transition.TIME_SHORT, reason, requeue=True), grace_s)


def end(turn: Turn, ending: Ending, grace_s: float) -> None:
    """Stop what runs, and then end so."""
    phase = turn.state.phase
    turn.decided("the job ends", ending.reason)
    if phase in ("waiting", "checking"):
        transition.finish(turn, ending)
        return
    turn.set(ending=replace(ending, grace_s=grace_s))
    if phase != "stopping":  # a recovery that stops its workers already goes on doing so
        recovery.stop(turn, grace_s)


def on_drain_asked(turn: Turn, event: DrainAsked) -> None:
    """A host leaves when another can take its place."""
    state, name = turn.state, event.host
    host = state.hosts.get(name)
    if host is None or host.state in ("evicted", "gone"):
        turn.alert("warning", f"{event.who or 'a person'} drains it, but it is no host of this job", name)
        return
    why = f"drained by {event.who or 'a person'}"
    if state.has_workers and state.has_place(name):
        turn.set_host(name, leaves=why, state="draining" if host.state == "active" else host.state)
        turn.alert("info", f"{why}: it leaves as soon as another can take its place", name)
    elif name in state.awaited or (host.state == "active" and not state.has_workers):
        turn.set_host(name, leaves=why)
    else:
        turn.release(name, why)


def on_evict_asked(turn: Turn, event: EvictAsked) -> None:
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


def on_return_asked(turn: Turn, event: ReturnAsked) -> None:
    """A host that was evicted or is to be drained may stay."""
    host = turn.state.hosts.get(event.host)
    who = event.who or "a person"
    if host is None:
        turn.alert("warning", f"{who} lets it return, but it was never a host of this job", event.host)
    elif host.state == "evicted":
        turn.set_host(event.host, state="gone", why=f"may join again, says {who}", is_proven=False)
        turn.set(history={mark: times for mark, times in turn.state.history.items() if mark != f"host {event.host}"})
    elif host.leaves:
        turn.set_host(event.host, leaves="", state="active" if host.state == "draining" else host.state)
