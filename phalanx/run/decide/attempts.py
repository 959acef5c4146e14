"""The way of an attempt from waiting for hosts to its first step, and what it does while it runs.

An attempt begins with a quorum of hosts: `run.hosts`, or one of `run.allowed_hosts`
where the job may shrink and no replacement has come.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from phalanx.run.decide import actions, escalation
from phalanx.run.decide.actions import GO_ON_PAGE, AskForHosts, OpenStore, Start, Where
from phalanx.run.decide.events import Advanced, Restored, Running, Started, Stopped, StoreOpened, WorkersReturned
from phalanx.run.decide.state import Ending, Host, HostState, Progress, State, Turn, count_ready, listed, ready_hosts

SLOW_S = 1.0
"""Imports of ranks that start fresh are worth a word from here on."""

# Waiting


def begin_if_possible(turn: Turn) -> bool:
    """Begin the next attempt, if there are hosts for it and no pause is due; else set until when to wait."""
    state = turn.state
    ready = count_ready(state)
    # A host that is to leave still serves as long as nothing can replace it.
    stopgap = [host for host in state.leaving if state.hosts[host].state in ("draining", "spare", "active")]
    lacks = ready + len(stopgap) < state.job.hosts
    if lacks != (state.lacking_since_s is not None):
        turn.set(lacking_since_s=turn.now_s if lacks else None)
    policy, since_s = state.policy, turn.state.lacking_since_s
    size = _size_to_start(turn.state, ready) or _size_to_start(turn.state, ready + len(stopgap))
    # A requeued job gets its hosts from the scheduler; one that waits for ever holds those that it has idle.
    if not size and policy.give_up_s > 0 and since_s is not None and turn.now_s >= since_s + policy.give_up_s:
        reason = f"only {ready} of {state.job.hosts} hosts were there after {policy.give_up_s:.0f} s (give_up_s)"
        turn.finish(Ending(actions.NO_HOSTS, reason, requeue=True))
        return True
    if not size or turn.now_s < state.restarts.not_before_s:
        # When something else can be decided without any other event.
        times_s = [state.restarts.not_before_s]
        if since_s is not None:
            times_s.append(since_s + policy.replace_wait_s)
            times_s += [since_s + policy.give_up_s] if policy.give_up_s > 0 else []
        turn.set(deadline_s=min((time_s for time_s in times_s if time_s > turn.now_s), default=None))
        return False
    chosen = ready_hosts(state)
    if ready < size:
        chosen = sorted([*chosen, *stopgap[: size - ready]], key=lambda name: (state.hosts[name].rack, name))
    _open(turn, place(state.placement, chosen, size, state.hosts))
    return True


def _size_to_start(state: State, ready: int) -> int:
    """On how many hosts the job can start now; 0: it has to wait."""
    if ready >= state.job.hosts:
        return state.job.hosts
    since_s = state.lacking_since_s
    has_waited = since_s is not None and state.now_s >= since_s + state.policy.replace_wait_s
    if state.policy.when_missing == "shrink" and has_waited:
        return next((size for size in state.job.sizes() if size <= ready), 0)
    return 0


def place(previous: tuple[str, ...], ready: list[str], size: int, hosts: Mapping[str, Host]) -> tuple[str, ...]:
    """Hosts of the next attempt in order of their ranks.

    A host keeps its place, and one that replaces another takes the place of that; a replacement of the same rack is
    preferred. So data and caches on a host's disk stay those of its ranks, and few rings change. If the number of hosts
    has changed, hosts that had ranks are chosen first, and all are ordered by rack and name.

    Args:
        previous: the placement before.
        ready: at least `size` hosts, in order of rack and name.
        hosts: for racks.
    """
    available = set(ready)
    stay = [host for host in previous if host in available]
    if len(previous) != size:
        first = set(stay[:size])
        others = [host for host in ready if host not in first][: size - len(first)]
        return tuple(sorted([*first, *others], key=lambda name: (hosts[name].rack, name)))
    kept = set(stay)
    fresh = [host for host in ready if host not in kept]
    placement = []
    for host in previous:
        if host not in kept:
            rack = hosts[host].rack if host in hosts else ""
            host = fresh.pop(next((i for i, name in enumerate(fresh) if hosts[name].rack == rack), 0))
        placement.append(host)
    return tuple(placement)


def _open(turn: Turn, placement: tuple[str, ...]) -> None:
    """Begin an attempt on these hosts: its store first, to which all of their ranks connect."""
    state = turn.state
    chosen = {name: place for place, name in enumerate(placement)}
    for name, host in state.hosts.items():
        if (place := chosen.get(name)) is not None:
            turn.set_host(name, state="draining" if host.leaves else "active", why="", place=place)
        elif host.state == "active":
            turn.set_host(name, state="spare", why="ready", place=-1)
        elif host.place >= 0:
            turn.set_host(name, place=-1)
    # Above every number that an executor has seen, also from a driver whose journal was lost: lower ones are refused.
    attempt = max(state.attempt, state.highest_seen) + 1
    before = state.placement
    if before and placement != before:
        moves = f"{len(placement)} hosts instead of {len(before)}"
        if len(before) == len(placement):
            pairs = zip(before, placement, strict=True)
            moves = listed(f"{new} takes the ranks of {old}" for old, new in pairs if old != new)
        turn.decided(moves, "these hosts are ready")
    turn.set(attempt=attempt, placement=placement, store_port=0, left={}, lacking_since_s=None, highest_seen=attempt)
    # What counts as progress of the next attempt is measured against all before it.
    progress = state.progress
    done = -1 if progress.is_absolute else progress.done
    turn.set(
        progress=Progress(
            best=progress.best,
            most=max(progress.most, done),
            last_done=done if done >= 0 else progress.last_done,
            base=progress.base,
            first=progress.first,
            earlier=progress.earlier + (0 if progress.is_absolute else max(progress.done, 0)),
            was_new=escalation.has_progressed(progress, state.policy),
        )
    )
    turn.enter("opening", state.policy.store_s)
    count, wanted = len(placement), state.job.hosts
    why = f"{count} of {wanted} hosts are ready" if count < wanted else "its hosts are ready"
    turn.decided(f"attempt {attempt} begins on {listed(placement)}", why)
    turn.act(OpenStore(attempt, placement[0]))
    for leaver in turn.state.leaving:
        if leaver not in chosen:
            turn.release(leaver, turn.state.hosts[leaver].leaves)


_THERE: tuple[HostState, ...] = ("joining", "spare", "active", "suspect")


def ask_for_missing(turn: Turn) -> None:
    """Have the back end bring what job and spares need, less the hosts that are or may be there; when it changes."""
    state = turn.state
    if state.policy.advise_only and state.has_workers:
        return  # it would be for a host that was lost
    # A host that is not heard of may still do its work, but cannot begin any.
    unknown = state.staying.get("unknown", 0) if state.has_workers else 0
    there = unknown + sum(state.staying.get(kind, 0) for kind in _THERE)
    missing = max(0, state.job.hosts + state.job.spares - there)
    if missing != state.asked:
        turn.set(asked=missing)
        turn.act(AskForHosts(missing))


# Opening and starting


def on_store_opened(turn: Turn, event: StoreOpened) -> None:
    """The ranks can be started."""
    state = turn.state
    if state.phase == "opening":
        turn.set(store_port=event.port)
        turn.enter("starting", state.policy.start_s, awaited=state.placement)
        turn.act(start(turn.state, state.placement))


def start(state: State, hosts: tuple[str, ...]) -> Start:
    """The action that starts the ranks of these hosts."""
    per_host = state.job.workers_per_host
    return Start(state.attempt, hosts, state.placement, per_host, state.store_port, state.attempt - 1, state.version)


def on_started(turn: Turn, event: Started) -> None:
    """One host more has started its ranks; after the last one the first step is waited for."""
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
    how = "makes steps"
    if event.is_absolute:
        # Where restoring has reported, it is known that the script looks for its checkpoint.
        if 0 <= step <= state.progress.first and state.progress.after < 0:
            how = "started over: your script does not load its checkpoint"
            _tell_started_over(turn, f"attempt {state.attempt} {how}, or had written none: step {step} comes again")
        turn.state = escalation.went_on_from(turn.state, step - 1)
        first = state.progress.first
        turn.set(progress=replace(turn.state.progress, first=min(first, step) if first >= 0 else step))
    first_step = event.step if event.is_absolute else -1
    spared = f"; --start warm would have spared {event.imported_s:.1f} s of it" if event.imported_s >= SLOW_S else ""
    turn.close_incident(f"attempt {state.attempt} {how}{spared}", first_step)
    turn.enter("running")


def _tell_started_over(turn: Turn, text: str) -> None:
    """All that the attempts before have done is lost, and will be again after the next fault."""
    turn.alert("error", text)
    turn.open_incident("driver", text)
    turn.advise(f"let your script save and load its checkpoint, or all is lost at the next fault, too: {GO_ON_PAGE}")


def on_advanced(turn: Turn, event: Advanced) -> None:
    """Steps advance."""
    state, found = turn.state, turn.state.recovery
    if state.phase not in ("running", "diagnosing", "stopping"):
        return
    progress = escalation.advanced(state.progress, event.step, event.is_absolute, turn.now_s - max(event.age_s, 0.0))
    is_new = progress.done > state.progress.done
    turn.set(progress=progress)
    # A hang whose ranks move again before they are stopped was none; a failure or a lost host stays one.
    is_only_hang = found is not None and found.cause == "hang" and not found.failures and not found.lost
    if state.phase == "diagnosing" and is_new and is_only_hang:
        turn.set(recovery=None)
        turn.close_incident("steps advance again: nothing was done", result="false alarm")
        turn.enter("running")


def on_workers_returned(turn: Turn, event: WorkersReturned) -> None:
    """All ranks have ended well."""
    state = turn.state
    if state.phase in ("starting", "running", "diagnosing") and not (state.recovery and state.recovery.failures):
        turn.finish(Ending(actions.DONE, "every rank has returned"))


def on_stopped(turn: Turn, event: Stopped) -> None:
    """A host has nothing left of the attempt."""
    state = turn.state
    if state.phase != "stopping" or event.host not in state.awaited:
        return
    turn.no_longer_awaited(event.host)
    if not event.stuck:
        return
    # A process in an uninterruptible sleep holds its device: no rank can be started there until the host reboots.
    why = f"processes {', '.join(map(str, event.stuck[:8]))} do not end"
    turn.note(f"executor of {event.host}", why, Where(event.host))
    turn.alert("error", f"{why}: the host has to be restarted", event.host)
    if state.recovery is not None:
        turn.learn(stuck={**state.recovery.stuck, event.host: why})
