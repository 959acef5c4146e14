"""A job that makes no step: what is done about it, and what a second time at the same place teaches. Pure; torch-free.

That nothing moves is a reason to begin anew, and no more: it blames no host, and however often it comes back it does
not end the job. A job that stands still twice at the same place may just take long there: each such alarm doubles the
time after which the next one comes, for the rest of the job.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from phalanx.run.decide import recovery
from phalanx.run.decide.actions import Where
from phalanx.run.decide.events import NoProgress, SuspectsNamed
from phalanx.run.decide.state import State
from phalanx.run.decide.turn import Turn

HELD_UP = "held up by"
"""So begins what is said of ranks that are named and not blamed."""

_PLACES = 16
"""So many of the places where it hung are known."""


def on_no_progress(turn: Turn, event: NoProgress) -> None:
    """No step for too long."""
    if turn.state.phase not in ("starting", "running"):
        return
    text = event.why or f"no step for {event.age_s:.1f} s, where {event.limit_s:.1f} s is the limit"
    if event.kind == "long":
        turn.alert("warning", f"{text}: nothing is done about it")
        return
    if all_unknown(turn.state):
        turn.alert("warning", f"{text}; but no host is heard of, so it may be the driver that is cut off: it waits")
        return
    if event.kind == "stopped":
        if recovery.see(turn, "hang", "state of the processes", text, late_s=event.age_s):
            turn.advise("find out what stopped, killed or cut off these ranks: nothing that Phalanx does")
            _suspect(turn, event.ranks, text)
        return
    setting = "run.limits.first_step_s" if turn.state.phase == "starting" else "run.limits.floor_s"
    cure = f"if such a pause is healthy, set {setting} above it (now {event.limit_s:g})"
    if recovery.see(turn, "hang", "step limit", f"{text}; {cure}", late_s=event.age_s):
        longer = f"--set {setting}={2 * event.limit_s:g}"
        turn.advise(f"if this was a healthy pause, allow for it: {longer}, or more if it takes longer than that")
        turn.advise("if not, mend what the ranks waited for: stacks are among what was seen, and all in the evidence")
        _note_step(turn, event.limit_s)


def on_suspects_named(turn: Turn, event: SuspectsNamed) -> None:
    """The evidence has been judged: who is proven to be at fault is a suspect, of others only the place is told."""
    state = turn.state
    if state.phase not in ("diagnosing", "stopping") or state.recovery is None:
        return
    who = ", ".join(f"rank {rank} on {state.host_of(rank)}" for rank in event.ranks[:8])
    where = Where(state.host_of(event.ranks[0]) or "", event.ranks[0]) if event.ranks else Where()
    why = event.why.removeprefix(f"{who} ")  # said of one rank it begins with its name
    if not who:
        text = f"nobody stands out: {event.why}"
    elif event.is_proven:
        text = f"suspected: {who}: {why}"
    else:
        text = f"{HELD_UP} {who}: {why}; that proves no fault of a host, so none is blamed"
    for wait in event.waits:
        turn.note("stacks", wait)
    turn.note("judge of the evidence", text, where)
    if event.is_proven:
        _suspect(turn, event.ranks, event.why)
        if event.group:
            hosts = (host for rank in event.group_ranks if (host := state.host_of(rank)) is not None)
            turn.learn(group=event.group, group_hosts=tuple(dict.fromkeys(hosts)))
    if event.place and not event.is_proven:
        _note_place(turn, event.place)
    if state.phase == "diagnosing" and state.recovery.cause == "hang":
        recovery.stop(turn)


def all_unknown(state: State) -> bool:
    """Whether nothing is heard of any host of the attempt."""
    return all(state.hosts[host].state in ("unknown", "gone", "evicted") for host in state.placement)


def _suspect(turn: Turn, ranks: Sequence[int], why: str) -> None:
    known = turn.state.recovery
    if known is not None:
        suspects = {host: why for rank in ranks if (host := turn.state.host_of(rank)) is not None}
        turn.learn(suspects={**known.suspects, **suspects})


def _note_step(turn: Turn, limit_s: float) -> None:
    """It has hung after this step; no further than the last time, and it is the same place."""
    hangs, progress = turn.state.hangs, turn.state.progress
    step = progress.best if progress.is_absolute else progress.done
    is_again = hangs.count > 0 and step <= hangs.step
    known = replace(hangs, count=hangs.count + 1, step=max(step, hangs.step), limit_s=limit_s, is_widened=False)
    turn.set(hangs=known)
    if is_again:
        _widen(turn, f"it has hung before, and no step was made since then beyond step {hangs.step}")


def _note_place(turn: Turn, place: str) -> None:
    hangs = turn.state.hangs
    if place in hangs.places and not hangs.is_widened:
        _widen(turn, f"it has hung before at the same place, {place}")
    elif place not in hangs.places:
        turn.set(hangs=replace(hangs, places=(*hangs.places, place)[-_PLACES:]))


def _widen(turn: Turn, why: str) -> None:
    hangs = turn.state.hangs
    floor_s = 2 * hangs.limit_s
    turn.set(hangs=replace(hangs, floor_s=floor_s, is_widened=True))
    turn.note("step limit", f"{why}: from now on it is a hang after {floor_s:g} s in which nothing moves")
