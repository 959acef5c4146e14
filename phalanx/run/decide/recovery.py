"""From something that went wrong to the next attempt: collect, gather evidence, stop, conclude, check. Torch-free."""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.core.units import duration
from phalanx.run.decide import advice, between, brakes, checks, endings, ladder, user_code
from phalanx.run.decide.actions import Gather, Stop, Where
from phalanx.run.decide.placement import can_spare, count_ready
from phalanx.run.decide.state import Cause, Failure, Recovery, State
from phalanx.run.decide.turn import Turn

_DECISIVE = ("signal", "interrupted", "start", "silent", "loss")
_SUMMARY_CHARACTERS = 500
LEFT = "left with exit status 0 while others had not ended"
_NOWHERE = Where()

# Collect


def see(
    turn: Turn,
    cause: Cause,
    seen_by: str,
    text: str,
    where: Where = _NOWHERE,
    *,
    late_s: float = 0.0,
    follows: bool = False,
) -> bool:
    """Something is wrong with the present attempt: begin a recovery, or add to the one that goes on.

    Args:
        late_s: how long it was so before it was noticed, as far as that is known.
        follows: it only says that a peer is gone.

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
    else:  # what an advice was given about
        turn.set(recovery=replace(state.recovery, cause=cause, began_s=turn.now_s, why=text, is_decided=False))
    if state.policy.advise_only and cause != "planned":
        return True
    turn.open_incident(seen_by, text, where, late_s, is_own=not follows)
    _first_phase(turn, cause)
    return True


def _first_phase(turn: Turn, cause: Cause) -> None:
    state = turn.state
    if cause == "hang":
        turn.enter("diagnosing", state.policy.evidence_s)
        turn.decided("evidence of all ranks is gathered before they are killed", "none of them says what is wrong")
        turn.act(Gather(state.attempt, present(state)))
    elif cause == "planned":
        stop(turn)
    else:
        turn.enter("diagnosing", state.policy.settle_s)


def add_failure(turn: Turn, host: str, failure: Failure) -> None:
    """A rank of this host, or all of it, has failed; what is known of that rank already stays."""
    state, recovery = turn.state, turn.state.recovery
    if recovery is None:
        return
    known = recovery.failures.get(host, ())
    if any(other.rank in (failure.rank, -1) for other in known):
        return
    short = replace(failure, summary=failure.summary[:_SUMMARY_CHARACTERS])
    ranks = 1 if failure.rank >= 0 else state.job.workers_per_host - len(known)
    turn.learn(
        failures={**recovery.failures, host: (*known, short)},
        failed=recovery.failed + ranks,
        words=user_code.counted(recovery.words, short, ranks),
        is_clear=recovery.is_clear or _is_clear(state, short),
    )


def _is_clear(state: State, failure: Failure) -> bool:
    """Whether nothing that others say could change what is made of it."""
    if failure.follows:
        return False
    return failure.kind in _DECISIVE or user_code.of_one(state, failure) is not None


def add_lost(turn: Turn, host: str, why: str) -> None:
    """A host is gone."""
    if turn.state.recovery is not None:
        turn.learn(lost={**turn.state.recovery.lost, host: why})


def is_settled(state: State) -> bool:
    """Whether the culprit has spoken, so that nothing else need be waited for."""
    recovery = state.recovery
    if recovery is None or recovery.cause == "hang":
        return False
    is_common = 2 * max(recovery.words.values(), default=0) > state.world_size
    return bool(recovery.lost) or recovery.is_clear or is_common or recovery.failed >= state.world_size


def all_failed(state: State) -> bool:
    """Whether no rank of the attempt is left."""
    recovery, per_host = state.recovery, state.job.workers_per_host
    if recovery is None:
        return False
    lost = sum(per_host for host in recovery.lost if state.has_place(host) and host not in recovery.failures)
    return recovery.failed + lost >= state.world_size


# Stop


def present(state: State) -> tuple[str, ...]:
    """Hosts of the attempt that may still have something of it."""
    return tuple(host for host in state.placement if state.hosts[host].state not in ("gone", "evicted"))


def stop(turn: Turn, grace_s: float = 0.0) -> None:
    """End all processes of the attempt, and wait for that."""
    hosts = present(turn.state)
    turn.enter("stopping", grace_s + turn.state.policy.stop_s, awaited=hosts)
    if hosts:
        turn.act(Stop(turn.state.attempt, hosts, grace_s))


def hurry(turn: Turn) -> None:
    """Hosts that are not heard of are not waited for as long as others, unless they are most of all."""
    state = turn.state
    if state.deadline_s is None or ladder.is_driver_cut_off(state, len(state.awaited)):
        return
    usual_s = state.grace_s + state.policy.stop_s
    were_most = state.deadline_s > state.phase_since_s + usual_s  # and are not now: the others have just come back
    are_unknown = all(state.hosts[host].state == "unknown" for host in state.awaited)
    wait_s = state.policy.unknown_stop_s if are_unknown else usual_s
    limit_s = (turn.now_s if were_most else state.phase_since_s) + wait_s
    if limit_s < state.deadline_s:
        turn.set(deadline_s=limit_s)


def not_stopped(turn: Turn) -> None:
    """The limit has passed, and hosts have not said that their processes are gone."""
    state = turn.state
    until_s = state.phase_since_s + state.policy.cut_off_s
    if not ladder.is_driver_cut_off(state, len(state.awaited)) or turn.now_s >= until_s:
        _give_up_on_silent(turn)
        return
    why = f"{len(state.awaited)} of {len(state.placement)} hosts do not say that their processes are gone"
    turn.alert("error", f"{why}; it may be the driver that is cut off: it waits {state.policy.cut_off_s:.0f} s")
    turn.decided("no host is given back yet", f"{why}: a common cause")
    turn.set(deadline_s=until_s)
    turn.act(Stop(state.attempt, tuple(state.awaited)))


def _give_up_on_silent(turn: Turn) -> None:
    """The back end makes sure that nothing of the attempt is left there."""
    for host in tuple(turn.state.awaited):
        why = "it did not say in time that its processes are gone"
        turn.decided(f"{host} is given back, so that nothing of the attempt goes on there", why)
        turn.release(host, why)
        add_lost(turn, host, why)
    turn.set(awaited={})


# Conclude


def conclude(turn: Turn) -> None:
    """No process of the attempt is left: decide how to go on."""
    state = turn.state
    if state.ending is None and state.recovery is not None:
        if state.recovery.cause != "planned":
            _judge(turn)
        elif brakes.has_progressed(state.progress, state.policy):
            turn.set(brakes=replace(state.brakes, idle=0, struck=()))
    if turn.state.ending is not None:
        endings.finish(turn, turn.state.ending)
        return
    for host, why in (turn.state.recovery.evict if turn.state.recovery else {}).items():
        if turn.state.hosts[host].state != "evicted":
            turn.decided(f"{host} is evicted", why)
            turn.evict(host, why)
    let_leave(turn)
    if turn.state.awaited:
        turn.enter("checking", awaited=turn.state.awaited)
    else:
        wait(turn)


def _judge(turn: Turn) -> None:
    _name_who_left(turn)
    state = turn.state
    recovery = state.recovery
    assert recovery is not None, "something is judged"
    if summary := advice.together(state):
        turn.note("driver", summary)
    # A job that only stands still may just take long, so that its restarts are no reason to end it.
    is_stillness = ladder.is_stillness(recovery)
    pressed = brakes.counted(state) if is_stillness else brakes.pressed(state)
    turn.set(last_word=user_code.last_word(state))
    if script := user_code.first_own(state):
        turn.advise(advice.read_log(script.rank, script.summary))
    ending = user_code.verdict(state) or brakes.verdict(state.policy, pressed)
    if ending is not None:
        turn.decided(f"the job ends with status {ending.status}", ending.reason)
        turn.set(ending=ending)
        return
    turn.set(brakes=pressed)
    if brakes.is_healthy(state.progress, state.policy) and not brakes.got_further(state.progress):
        lived = duration(state.progress.lived_s)
        why = f"attempt {state.attempt} made steps for {lived}; whether it got further than others nobody says"
        turn.decided("this is no crash loop", why)
    _climb(turn, ladder.plan(state, recovery))


def _name_who_left(turn: Turn) -> None:
    """Where no rank says what is wrong with it, those that have ended before the others are why these stand still."""
    state, recovery = turn.state, turn.state.recovery
    if not state.left or recovery is None or recovery.lost:
        return
    if any(not failure.follows for failure in user_code.failures_of(state)):
        return
    turn.learn(suspects={}, group="", group_hosts=())  # the others wait, and look guilty of that
    for rank, step in state.left.items():
        host = state.host_of(rank)
        if host is not None:
            failure = Failure(rank, "left", "process", f"rank {rank} {LEFT}", step=step)
            add_failure(turn, host, failure)
            text = failure.summary + (f" (step {step})" if step >= 0 else "")
            turn.note(f"executor of {host}", text, Where(host, rank, step), is_own=True)


def _climb(turn: Turn, plan: ladder.Plan) -> None:
    turn.decided(plan.what, plan.why)
    turn.set(history=ladder.with_marks(turn.state, plan.marks))
    turn.learn(evict=plan.evict, is_decided=True)
    if plan.use_previous:
        turn.set(version=turn.state.job.previous_version)
    if plan.is_between:
        between.begin(turn, tuple(plan.checks), turn.state.policy.active_check)
    else:
        checks.ask_suspects(turn, plan.checks)


def wait(turn: Turn) -> None:
    """On to the next attempt, as soon as there are hosts for it."""
    turn.set(recovery=None, ways={}, lacking_since_s=None)
    turn.enter("waiting")


def let_leave(turn: Turn) -> None:
    """Give back hosts that are to leave, as many as can be replaced; only while no attempt has processes."""
    for host in turn.state.leaving:
        staying = len(turn.state.leaving) - 1
        if count_ready(turn.state) + staying >= turn.state.job.hosts or can_spare(turn.state, {host}):
            why = turn.state.hosts[host].leaves
            turn.decided(f"{host} is given back", why)
            turn.release(host, why)
