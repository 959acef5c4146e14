"""The driver has been restarted: what has to be performed again, whatever of it was performed before. Torch-free."""

from __future__ import annotations

from phalanx.run.decide import attempts
from phalanx.run.decide.actions import AskForHosts, Check, Evict, Finish, Gather, OpenStore, Stop
from phalanx.run.decide.state import State
from phalanx.run.decide.turn import Turn


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
        turn.act(attempts.start(state, tuple(state.awaited)))
    elif state.phase == "diagnosing" and state.recovery is not None and state.recovery.cause == "hang":
        turn.act(Gather(state.attempt, tuple(h for h in state.placement if state.hosts[h].state != "gone")))
    elif state.phase == "stopping":
        turn.act(Stop(state.attempt, tuple(state.awaited), state.grace_s))
