"""What people and the back end's clock order. Torch-free."""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.run.decide import endings, recovery
from phalanx.run.decide.actions import Stop
from phalanx.run.decide.events import DrainAsked, EvictAsked, ReturnAsked, StopAsked, TimeShort
from phalanx.run.decide.state import Ending
from phalanx.run.decide.turn import Turn


def on_stop_asked(turn: Turn, event: StopAsked) -> None:
    """A person ends the job; asked again, sooner."""
    state = turn.state
    if state.ending is not None and state.phase == "stopping":
        grace_s = _given(event, 0.0)
        turn.set(ending=replace(state.ending, grace_s=grace_s))
        turn.enter("stopping", grace_s + state.policy.stop_s, awaited=state.awaited)
        turn.act(Stop(state.attempt, tuple(state.awaited), grace_s))
        return
    stopped = Ending(endings.STOPPED, f"stopped by {event.who or 'a person'}", by_person=True)
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
    end(turn, Ending(endings.TIME_SHORT, reason, requeue=True), grace_s)


def end(turn: Turn, ending: Ending, grace_s: float) -> None:
    """Stop what runs, and then end so."""
    phase = turn.state.phase
    turn.decided("the job ends", ending.reason)
    if phase in ("waiting", "checking"):
        endings.finish(turn, ending)
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
