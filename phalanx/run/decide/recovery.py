"""From something that went wrong to the next attempt: collect, gather evidence, stop, conclude, check.

That nothing moves is a reason to begin anew, and no more: it blames no host, and however often it comes back it does
not end the job. A job that stands still twice at the same place may just take long there: each such alarm doubles the
time after which the next one comes, for the rest of the job.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from phalanx.core.units import duration
from phalanx.run.decide import escalation, host_checks
from phalanx.run.decide.actions import HELD_UP, LEFT, Gather, Stop, Where, read_log
from phalanx.run.decide.events import (
    Fault,
    LeftEarly,
    LossBroken,
    NoProgress,
    StartFailed,
    StoreFailed,
    SuspectsNamed,
    TrafficSilent,
    WorkerFailed,
)
from phalanx.run.decide.state import NOWHERE, Cause, Failure, Recovery, State, Turn, can_spare, count_ready, listed

_DECISIVE = ("signal", "interrupted", "start", "silent", "loss")
_SUMMARY_CHARACTERS = 500
_PLACES = 16
"""So many of the places where the job hung are known."""

# Collect


def see(
    turn: Turn,
    cause: Cause,
    seen_by: str,
    text: str,
    where: Where = NOWHERE,
    *,
    late_s: float = 0.0,
    follows: bool = False,
) -> bool:
    """Something is wrong with the present attempt: begin a recovery, or add to the one that goes on.

    Args:
        late_s: how long it was so before it was noticed, as far as that is known.
        follows: it only reports that a peer is gone.

    Returns:
        False: the attempt is over anyway, and this changes nothing.
    """
    state = turn.state
    is_calm = state.phase in ("opening", "starting", "running")
    if state.recovery is not None and not state.recovery.is_decided and not (is_calm and cause == "planned"):
        turn.note(seen_by, text, where, is_own=cause == "failure" and not follows)
        return state.has_workers
    if not is_calm:
        return False
    if state.recovery is None:
        turn.set(recovery=Recovery(cause, turn.now_s, text))
    else:  # that of an advice which was given
        turn.set(recovery=replace(state.recovery, cause=cause, began_s=turn.now_s, why=text, is_decided=False))
    if state.policy.advise_only and cause != "planned":
        return True
    turn.open_incident(seen_by, text, where, late_s, is_own=not follows)
    if cause == "planned":
        stop(turn)
    elif cause == "failure":
        # One death makes its peers fail within milliseconds, often before its own report is here: wait for that one.
        turn.enter("diagnosing", state.policy.settle_s)
    else:
        # Killing the ranks destroys their stacks: gather evidence first, but never wait long for it.
        turn.enter("diagnosing", state.policy.evidence_s)
        turn.decided("evidence of all ranks is gathered before they are killed", "none of them says what is wrong")
        turn.act(Gather(state.attempt, _present(state)))
    return True


def _add_failure(turn: Turn, host: str, failure: Failure) -> None:
    """A rank of this host, or all of it, has failed; what is known of that rank already stays."""
    state, recovery = turn.state, turn.state.recovery
    if recovery is None:
        return
    known = recovery.failures.get(host, ())
    if any(other.rank in (failure.rank, -1) for other in known):
        return
    short = replace(failure, summary=failure.summary[:_SUMMARY_CHARACTERS])
    ranks = 1 if failure.rank >= 0 else state.job.workers_per_host - len(known)
    # Clear: nothing that others report could change what is made of it.
    is_clear = short.kind in _DECISIVE or escalation.verdict_on_one(state, short) is not None
    turn.learn(
        failures={**recovery.failures, host: (*known, short)},
        failed=recovery.failed + ranks,
        texts=escalation.with_text(recovery.texts, short, ranks),
        is_clear=recovery.is_clear or (not short.follows and is_clear),
    )


def add_lost(turn: Turn, host: str, why: str) -> None:
    """A host is gone."""
    if turn.state.recovery is not None:
        turn.learn(lost={**turn.state.recovery.lost, host: why})


def is_settled(state: State) -> bool:
    """Whether the cause is known, so that nothing else need be waited for."""
    recovery = state.recovery
    if recovery is None or recovery.cause == "hang":
        return False
    is_common = 2 * max(recovery.texts.values(), default=0) > state.world_size
    return bool(recovery.lost) or recovery.is_clear or is_common or recovery.failed >= state.world_size


def have_all_failed(state: State) -> bool:
    """Whether no rank of the attempt is left."""
    recovery, per_host = state.recovery, state.job.workers_per_host
    if recovery is None:
        return False
    lost = sum(per_host for host in recovery.lost if state.has_place(host) and host not in recovery.failures)
    return recovery.failed + lost >= state.world_size


# Stop


def _present(state: State) -> tuple[str, ...]:
    """Hosts of the attempt that may still have something of it."""
    return tuple(host for host in state.placement if state.hosts[host].state not in ("gone", "evicted"))


def stop(turn: Turn, grace_s: float = 0.0) -> None:
    """End all processes of the attempt, and wait for that.

    Healthy ranks too: their communicators hold dead peers, and half an attempt cannot take in new ranks.
    """
    hosts = _present(turn.state)
    turn.enter("stopping", grace_s + turn.state.policy.stop_s, awaited=hosts)
    if hosts:
        turn.act(Stop(turn.state.attempt, hosts, grace_s))


def proceed_stopping(turn: Turn) -> bool:
    """Conclude once all hosts have nothing left; wait less for those that are not heard of."""
    state = turn.state
    if not state.awaited:
        _conclude(turn)
        return True
    if state.deadline_s is not None and not state.is_driver_cut_off(len(state.awaited)):
        usual_s = state.grace_s + state.policy.stop_s
        were_most = state.deadline_s > state.phase_since_s + usual_s  # and are not now: the others have just come back
        are_unknown = all(state.hosts[host].state == "unknown" for host in state.awaited)
        wait_s = state.policy.unknown_stop_s if are_unknown else usual_s
        limit_s = (turn.now_s if were_most else state.phase_since_s) + wait_s
        if limit_s < state.deadline_s:
            turn.set(deadline_s=limit_s)
    deadline_s = turn.state.deadline_s
    return deadline_s is not None and turn.now_s >= deadline_s


def on_not_stopped(turn: Turn) -> None:
    """The limit has passed, and hosts have not reported that their processes are gone."""
    state = turn.state
    until_s = state.phase_since_s + state.policy.cut_off_s
    # Most hosts silent at once: the driver's own network is the likelier reason, and giving them back would end a job
    # whose ranks may all be well.
    if state.is_driver_cut_off(len(state.awaited)) and turn.now_s < until_s:
        why = f"{len(state.awaited)} of {len(state.placement)} hosts do not say that their processes are gone"
        turn.alert("error", f"{why}; it may be the driver that is cut off: it waits {state.policy.cut_off_s:.0f} s")
        turn.decided("no host is given back yet", f"{why}: a common cause")
        turn.set(deadline_s=until_s)
        turn.act(Stop(state.attempt, tuple(state.awaited)))
        return
    # The back end makes sure that nothing of the attempt is left there: a rank that goes on could still write.
    for host in tuple(state.awaited):
        why = "it did not say in time that its processes are gone"
        turn.decided(f"{host} is given back, so that nothing of the attempt goes on there", why)
        turn.release(host, why)
        add_lost(turn, host, why)
    turn.set(awaited={})


# Conclude


def _conclude(turn: Turn) -> None:
    """No process of the attempt is left: decide how to go on."""
    state = turn.state
    if state.ending is None and state.recovery is not None:
        if state.recovery.cause != "planned":
            _judge(turn)
        elif escalation.has_progressed(state.progress, state.policy):
            turn.set(restarts=replace(state.restarts, idle=0, struck=()))
    if turn.state.ending is not None:
        turn.finish(turn.state.ending)
        return
    for host, why in (turn.state.recovery.evict if turn.state.recovery else {}).items():
        if turn.state.hosts[host].state != "evicted":
            turn.decided(f"{host} is evicted", why)
            turn.evict(host, why)
    _let_leave(turn)
    if turn.state.awaited:
        turn.enter("checking", awaited=turn.state.awaited)
    else:
        _wait(turn)


def proceed_checking(turn: Turn) -> bool:
    """Begin to wait for the next attempt once all checks are answered."""
    if turn.state.awaited:
        return False
    if not host_checks.go_on(turn):
        _let_leave(turn)
        _wait(turn)
    return True


def _judge(turn: Turn) -> None:
    """Blame, and choose what to do; or end the job."""
    _name_early_leavers(turn)
    state = turn.state
    recovery = state.recovery
    assert recovery is not None, "something is judged"
    if summary := escalation.together(recovery):
        turn.note("driver", summary)
    # A job that only stands still may just take long, so that its restarts are no reason to end it: they count in
    # `Policy.max_restarts` alone.
    counts = escalation.restarts_after(state)
    if escalation.is_only_standstill(recovery):
        counts = replace(state.restarts, recoveries=state.restarts.recoveries + 1, not_before_s=state.now_s)
    turn.set(last_failure=escalation.last_failure(state))
    if failure := escalation.first_of_the_code(state):
        turn.advise(read_log(failure.rank, failure.summary))
    ending = escalation.verdict_on_code(state) or escalation.verdict_on_restarts(state.policy, counts)
    if ending is not None:
        turn.decided(f"the job ends with status {ending.status}", ending.reason)
        turn.set(ending=ending)
        return
    turn.set(restarts=counts)
    if escalation.is_healthy(state.progress, state.policy) and not escalation.got_further(state.progress):
        lived = duration(state.progress.lived_s)
        why = f"attempt {state.attempt} made steps for {lived}; whether it got further than others nobody says"
        turn.decided("this is no crash loop", why)
    plan = escalation.plan_recovery(state, recovery)
    turn.decided(plan.what, plan.why)
    turn.set(history=escalation.history_with(turn.state, plan.marks))
    turn.learn(evict=plan.evict, is_decided=True)
    if plan.use_previous:
        turn.set(version=turn.state.job.previous_version)
    if plan.is_between:
        host_checks.begin_rounds(turn, tuple(plan.checks), turn.state.policy.active_check)
    else:
        host_checks.ask_suspects(turn, plan.checks)


def _name_early_leavers(turn: Turn) -> None:
    """Where no rank reports what is wrong with it, those that ended before the others are why these stand still."""
    state, recovery = turn.state, turn.state.recovery
    if not state.left or recovery is None or recovery.lost:
        return
    if any(not failure.follows for failure in escalation.failures_of(state)):
        return
    turn.learn(suspects={}, group="", group_hosts=())  # the others wait, and look guilty of that
    for rank, step in state.left.items():
        host = state.host_of(rank)
        if host is not None:
            failure = Failure(rank, "left", "process", f"rank {rank} {LEFT}", step=step)
            _add_failure(turn, host, failure)
            text = failure.summary + (f" (step {step})" if step >= 0 else "")
            turn.note(f"executor of {host}", text, Where(host, rank, step), is_own=True)


def _wait(turn: Turn) -> None:
    """On to the next attempt, as soon as there are hosts for it."""
    turn.set(recovery=None, peer_tests={}, lacking_since_s=None)
    turn.enter("waiting")


def _let_leave(turn: Turn) -> None:
    """Give back hosts that are to leave, as many as can be replaced; only while no attempt has processes."""
    for host in turn.state.leaving:
        staying = len(turn.state.leaving) - 1
        if count_ready(turn.state) + staying >= turn.state.job.hosts or can_spare(turn.state, {host}):
            why = turn.state.hosts[host].leaves
            turn.decided(f"{host} is given back", why)
            turn.release(host, why)


# Steps that do not come


def on_no_progress(turn: Turn, event: NoProgress) -> None:
    """No step for too long."""
    if turn.state.phase not in ("starting", "running"):
        return
    text = event.why or f"no step for {event.age_s:.1f} s, where {event.limit_s:.1f} s is the limit"
    if event.kind == "long":
        turn.alert("warning", f"{text}: nothing is done about it")
        return
    if _are_all_unknown(turn.state):
        turn.alert("warning", f"{text}; but no host is heard of, so it may be the driver that is cut off: it waits")
        return
    if event.kind == "stopped":
        if see(turn, "hang", "state of the processes", text, late_s=event.age_s):
            turn.advise("find out what stopped, killed or cut off these ranks: nothing that Phalanx does")
            _suspect(turn, event.ranks, text)
        return
    setting = "run.limits.first_step_s" if turn.state.phase == "starting" else "run.limits.floor_s"
    cure = f"if such a pause is healthy, set {setting} above it (now {event.limit_s:g})"
    if not see(turn, "hang", "step limit", f"{text}; {cure}", late_s=event.age_s):
        return
    longer = f"--set {setting}={2 * event.limit_s:g}"
    turn.advise(f"if this was a healthy pause, allow for it: {longer}, or more if it takes longer than that")
    turn.advise("if not, mend what the ranks waited for: stacks are among what was seen, and all in the evidence")
    # If it hung after this step already, and got no further since, it is the same place.
    hangs, progress = turn.state.hangs, turn.state.progress
    step = progress.best if progress.is_absolute else progress.done
    count, most = hangs.count + 1, max(step, hangs.step)
    turn.set(hangs=replace(hangs, count=count, step=most, limit_s=event.limit_s, is_widened=False))
    if hangs.count > 0 and step <= hangs.step:
        _widen(turn, f"it has hung before, and no step was made since then beyond step {hangs.step}")


def on_suspects_named(turn: Turn, event: SuspectsNamed) -> None:
    """The evidence has been judged: ranks proven to be at fault are suspects, of others only the place is noted."""
    state = turn.state
    if state.phase not in ("diagnosing", "stopping") or state.recovery is None:
        return
    ranks = ", ".join(f"rank {rank} on {state.host_of(rank)}" for rank in event.ranks[:8])
    where = Where(state.host_of(event.ranks[0]) or "", event.ranks[0]) if event.ranks else NOWHERE
    why = event.why.removeprefix(f"{ranks} ")  # about one rank it begins with its name
    if not ranks:
        text = f"nobody stands out: {event.why}"
    elif event.is_proven:
        text = f"suspected: {ranks}: {why}"
    else:
        text = f"{HELD_UP} {ranks}: {why}; that proves no fault of a host, so none is blamed"
    for wait in event.waits:
        turn.note("stacks", wait)
    if event.line:
        turn.note("flight records", event.line)
    if event.spans_say:
        turn.note("spans", event.spans_say)
    turn.note("judge of the evidence", text, where)
    if event.is_proven:
        _suspect(turn, event.ranks, event.why)
        if event.group:
            hosts = (host for rank in event.group_ranks if (host := state.host_of(rank)) is not None)
            turn.learn(group=event.group, group_hosts=tuple(dict.fromkeys(hosts)))
    elif event.place:
        hangs = turn.state.hangs
        if event.place not in hangs.places:
            turn.set(hangs=replace(hangs, places=(*hangs.places, event.place)[-_PLACES:]))
        elif not hangs.is_widened:
            _widen(turn, f"it has hung before at the same place, {event.place}")
    if state.phase == "diagnosing" and state.recovery.cause == "hang":
        stop(turn)


def _are_all_unknown(state: State) -> bool:
    """Whether nothing is heard of any host of the attempt."""
    return all(state.hosts[host].state in ("unknown", "gone", "evicted") for host in state.placement)


def _suspect(turn: Turn, ranks: Sequence[int], why: str) -> None:
    known = turn.state.recovery
    if known is not None:
        suspects = {host: why for rank in ranks if (host := turn.state.host_of(rank)) is not None}
        turn.learn(suspects={**known.suspects, **suspects})


def _widen(turn: Turn, why: str) -> None:
    floor_s = 2 * turn.state.hangs.limit_s
    turn.set(hangs=replace(turn.state.hangs, floor_s=floor_s, is_widened=True))
    turn.note("step limit", f"{why}: from now on it is a hang after {floor_s:g} s in which nothing moves")


# Failures


def on_worker_failed(turn: Turn, event: WorkerFailed) -> None:
    """A rank has ended as it should not."""
    host = turn.state.host_of(event.rank)
    if host is None:
        return
    step, progress = event.step, turn.state.progress
    # The same step of the training in two attempts is the code's fault: count from the beginning where that is known.
    if step >= 0 and not progress.is_absolute:
        step += max(progress.after, 0)
    failure = Failure(event.rank, event.kind, event.fault, event.summary, event.follows, step)
    of_host(turn, host, failure, f"executor of {host}")


def of_host(turn: Turn, host: str, failure: Failure, seen_by: str) -> None:
    """A rank of a host has failed, or (rank -1) all of them."""
    state, found = turn.state, turn.state.recovery
    if found is not None and not found.is_decided and state.has_workers:
        # Of a host with thousands of failures the report shows the first: a line for each would hide it.
        has_own = any(not known.follows for known in found.failures.get(host, ()))
        if failure.follows or has_own:
            _add_failure(turn, host, failure)
            return
    where = Where(host, failure.rank, failure.step)
    if not see(turn, "failure", seen_by, escalation.of_failure(host, failure), where, follows=failure.follows):
        return
    _add_failure(turn, host, failure)
    # Ranks read their input within seconds of each other, and only what most of them refuse is bad input.
    state = turn.state
    if state.phase == "diagnosing" and failure.kind == "usage" and not state.progress.has_run:
        turn.set(deadline_s=state.phase_since_s + max(state.policy.settle_s, state.policy.refusal_s))


def on_left_early(turn: Turn, event: LeftEarly) -> None:
    """Ranks have ended well while others have not; that counts where nobody reports what else is wrong."""
    state = turn.state
    if state.phase not in ("starting", "running", "diagnosing", "stopping"):
        return
    steps = (*event.steps, *[-1] * (len(event.ranks) - len(event.steps)))
    known = zip(event.ranks, steps, strict=False)
    turn.set(left={rank: step for rank, step in known if state.host_of(rank) is not None})


def on_store_failed(turn: Turn, event: StoreFailed) -> None:
    """The first host of the placement could not open the store."""
    if turn.state.phase == "opening":
        host = turn.state.placement[0]
        failure = Failure(-1, "silent", "process", f"no store: {event.problem}")
        of_host(turn, host, failure, f"executor of {host}")


def on_not_opened(turn: Turn) -> None:
    """The limit for the store has passed."""
    host, limit_s = turn.state.placement[0], turn.state.policy.store_s
    of_host(turn, host, Failure(-1, "silent", "process", f"opened no store in {limit_s:.0f} s"), "driver")


def on_start_failed(turn: Turn, event: StartFailed) -> None:
    """A host could not start its ranks."""
    if turn.state.phase in ("starting", "diagnosing", "stopping") and turn.state.has_place(event.host):
        failure = Failure(-1, "start", "process", f"did not start: {event.problem}")
        of_host(turn, event.host, failure, f"executor of {event.host}")


def on_not_started(turn: Turn) -> None:
    """The limit of a start has passed."""
    limit_s = turn.state.policy.start_s
    for host in turn.state.awaited:
        failure = Failure(-1, "silent", "process", f"did not say in {limit_s:.0f} s that its ranks are started")
        of_host(turn, host, failure, "driver")


def on_traffic_silent(turn: Turn, event: TrafficSilent) -> None:
    """Training interfaces carry less, or nothing."""
    state = turn.state
    if len(state.placement) < 2 or state.phase != "running":
        return
    what = "nothing" if event.is_total else "less than they did"
    text = f"the training interfaces of {listed(event.hosts)} have carried {what} for {event.silent_s:.0f} s"
    if not (event.is_total and event.without_progress) or _are_all_unknown(state):
        turn.alert("warning", text)
        return
    seen_by = "traffic of the training interfaces"
    see(turn, "hang", seen_by, f"{text}, and no step was made", late_s=event.silent_s)


def on_loss_broken(turn: Turn, event: LossBroken) -> None:
    """The loss is not finite any more: go back once; if it comes back at the same step it is the code or its data."""
    if turn.state.phase != "running":
        return
    text = f"the loss is no finite number since step {event.step}"
    step, last = event.step, turn.state.last_failure
    if event.is_from_start and last is not None and last.kind == "loss":
        text += ", the first of this attempt: what it went on from was broken already"
        step = last.step  # so it is the same place
    if not see(turn, "failure", "losses of the ranks", text):
        return
    for rank in event.ranks or (0,):
        host = turn.state.host_of(rank)
        if host is not None:
            # Where all have the same loss none of them is to blame: it follows from something else.
            fault: Fault = "host" if event.ranks else "process"
            _add_failure(turn, host, Failure(rank, "loss", fault, "the loss is no finite number", step=step))
