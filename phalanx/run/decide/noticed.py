"""What log rules say of a host or rank, and what executors say of the script that they are to run. Torch-free."""

from __future__ import annotations

from phalanx.run.decide import endings, faults, orders, user_code
from phalanx.run.decide.actions import Where
from phalanx.run.decide.blame import OF_THE_HOST
from phalanx.run.decide.events import Noticed, StartFailed, Unprepared
from phalanx.run.decide.state import Ending
from phalanx.run.decide.turn import Turn


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
        if user_code.has_never_run(state):
            orders.end(turn, Ending(endings.BAD_INPUT, f"bad input: {event.problem}"), 0.0)
    elif state.has_workers and state.has_place(name):
        faults.on_start_failed(turn, StartFailed(event.at_s, state.attempt, name, event.problem))
    else:
        why = f"it cannot run the script, which others can: {event.problem}"
        turn.note(f"executor of {name}", why, Where(name))
        turn.alert("error", f"{why}; it is evicted", name)
        turn.evict(name, why)
