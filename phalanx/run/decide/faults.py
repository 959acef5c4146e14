"""Answers to events that say that something is wrong with the attempt. Torch-free."""

from __future__ import annotations

from phalanx.run.decide import advice, hangs, recovery
from phalanx.run.decide.actions import Where
from phalanx.run.decide.events import (
    Fault,
    LeftEarly,
    LossBroken,
    StartFailed,
    StoreFailed,
    TrafficSilent,
    WorkerFailed,
)
from phalanx.run.decide.state import Failure, State
from phalanx.run.decide.turn import Turn


def on_worker_failed(turn: Turn, event: WorkerFailed) -> None:
    """A rank has ended as it should not."""
    host = turn.state.host_of(event.rank)
    if host is None:
        return
    step = turn.state.progress.absolute(event.step)
    failure = Failure(event.rank, event.kind, event.fault, event.summary, event.follows, step)
    of_host(turn, host, failure, f"executor of {host}")


def of_host(turn: Turn, host: str, failure: Failure, seen_by: str) -> None:
    """A rank of a host has failed, or (rank -1) all of them."""
    state = turn.state
    going_on = state.recovery is not None and not state.recovery.is_decided
    if going_on and state.has_workers and (failure.follows or _has_spoken(state, host)):
        recovery.add_failure(turn, host, failure)  # without a line in the report for each of many ranks
        return
    where = Where(host, failure.rank, failure.step)
    if recovery.see(turn, "failure", seen_by, advice.of_failure(host, failure), where, follows=failure.follows):
        recovery.add_failure(turn, host, failure)


def _has_spoken(state: State, host: str) -> bool:
    """Whether a rank of this host has failed by itself."""
    failures = state.recovery.failures if state.recovery is not None else {}
    return any(not failure.follows for failure in failures.get(host, ()))


def on_left_early(turn: Turn, event: LeftEarly) -> None:
    """Ranks have ended well while others have not; that counts where nobody says what else is wrong."""
    state = turn.state
    if state.phase not in ("starting", "running", "diagnosing", "stopping"):
        return
    steps = (*event.steps, *[-1] * (len(event.ranks) - len(event.steps)))
    known = zip(event.ranks, steps, strict=False)
    turn.set(left={rank: step for rank, step in known if state.host_of(rank) is not None})


def on_store_failed(turn: Turn, event: StoreFailed) -> None:
    """The first host of the placement could not open the store."""
    if turn.state.phase != "opening":
        return
    host = turn.state.placement[0]
    of_host(turn, host, Failure(-1, "silent", "process", f"no store: {event.problem}"), f"executor of {host}")


def on_start_failed(turn: Turn, event: StartFailed) -> None:
    """A host could not start its ranks."""
    if turn.state.phase not in ("starting", "diagnosing", "stopping") or not turn.state.has_place(event.host):
        return
    failure = Failure(-1, "start", "process", f"did not start: {event.problem}")
    of_host(turn, event.host, failure, f"executor of {event.host}")


def on_traffic_silent(turn: Turn, event: TrafficSilent) -> None:
    """Training interfaces carry less, or nothing."""
    state = turn.state
    if len(state.placement) < 2 or state.phase != "running":
        return
    what = "nothing" if event.is_total else "less than they did"
    text = f"the training interfaces of {advice.names(event.hosts)} have carried {what} for {event.silent_s:.0f} s"
    if not (event.is_total and event.without_progress) or hangs.all_unknown(state):
        turn.alert("warning", text)
        return
    seen_by = "traffic of the training interfaces"
    recovery.see(turn, "hang", seen_by, f"{text}, and no step was made", late_s=event.silent_s)


def on_loss_broken(turn: Turn, event: LossBroken) -> None:
    """The loss stays no number: go back once, and if it comes back at the same step it is the code or its data."""
    if turn.state.phase != "running":
        return
    text = f"the loss is no finite number since step {event.step}"
    ranks, step, last = event.ranks or (0,), event.step, turn.state.last_word
    if event.is_from_start and last is not None and last.kind == "loss":
        text += ", the first of this attempt: what it went on from was broken already"
        step = last.step  # so it is the same place
    if not recovery.see(turn, "failure", "losses of the ranks", text):
        return
    for rank in ranks:
        host = turn.state.host_of(rank)
        if host is not None:
            # Where all have the same loss none of them is to blame: it follows from something else.
            fault: Fault = "host" if event.ranks else "process"
            failure = Failure(rank, "loss", fault, "the loss is no finite number", step=step)
            recovery.add_failure(turn, host, failure)
