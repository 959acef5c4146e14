"""What log rules say of a host or rank, and what executors say of the script that they are to run.

Hosts that come, are checked, are not heard of, and go.
"""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.run.decide import attempts, blame, escalation, host_checks, recovery, transition
from phalanx.run.decide.actions import Check, Evict, Gather, OpenStore, Release, Stop, Where
from phalanx.run.decide.blame import OF_THE_HOST
from phalanx.run.decide.events import (
    CheckFailed,
    CheckPassed,
    HostGone,
    HostJoined,
    HostUnknown,
    Noticed,
    SlowHost,
    StartFailed,
    Unprepared,
)
from phalanx.run.decide.state import Ending, Failure, Host
from phalanx.run.decide.transition import Turn


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
        if blame.has_never_run(state):
            attempts.end(turn, Ending(transition.BAD_INPUT, f"bad input: {event.problem}"), 0.0)
    elif state.has_workers and state.has_place(name):
        recovery.on_start_failed(turn, StartFailed(event.at_s, state.attempt, name, event.problem))
    else:
        why = f"it cannot run the script, which others can: {event.problem}"
        turn.note(f"executor of {name}", why, Where(name))
        turn.alert("error", f"{why}; it is evicted", name)
        turn.evict(name, why)


def on_joined(turn: Turn, event: HostJoined) -> None:
    """An executor has connected, for the first time or again."""
    state, name = turn.state, event.host
    if event.attempt > state.highest_seen:
        turn.set(highest_seen=event.attempt)
    known = state.hosts.get(name)
    if known is not None and known.state == "evicted":
        turn.act(Evict(name, known.why))
        return
    if name in state.checks:
        _ask_again(turn, name)
    elif known is not None and known.state != "gone" and state.has_workers and state.has_place(name):
        _come_back(turn, event, known)
    elif known is not None and known.state in ("spare", "active", "draining"):
        _end_leftovers(turn, event)
    else:
        _admit(turn, event, known)


def _admit(turn: Turn, event: HostJoined, known: Host | None) -> None:
    """A host that is new, or was away: it has to pass a check first."""
    was_away = known is not None and known.state == "unknown"
    changes = {
        "leaves": known.leaves if known is not None else "",
        "is_proven": known is not None and was_away and known.is_proven,
    }
    turn.set_host(event.host, rack=event.rack, state="joining", why="being checked", **changes)
    _end_leftovers(turn, event)
    host_checks.ask(turn, event.host, "passive" if was_away else turn.state.policy.joining_check)


def _end_leftovers(turn: Turn, event: HostJoined) -> None:
    """What runs there belongs to an attempt that this host has no part in; its executor refuses lower numbers."""
    if event.running:
        turn.act(Stop(max(turn.state.attempt, event.attempt), (event.host,)))


def _ask_again(turn: Turn, name: str) -> None:
    """It may never have heard of the check that it is asked for."""
    state = turn.state
    if state.hosts[name].state == "unknown":
        turn.set_host(name, state="suspect" if name in state.awaited else "joining", why="being checked")
    check = state.checks[name]
    turn.act(Check(name, check.number, check.kind, check.peers))


def _come_back(turn: Turn, event: HostJoined, known: Host) -> None:
    """A host of the present attempt: tell it again what it may not have heard."""
    state, name = turn.state, event.host
    turn.set_host(name, state="draining" if known.leaves else "active", why="")
    if turn.limit_has_passed:  # what follows from that is told to all hosts that it concerns
        return
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


def on_unknown(turn: Turn, event: HostUnknown) -> None:
    """Nothing is heard of a host: that alone is no reason to do anything, least of all while steps advance."""
    host = turn.state.hosts.get(event.host)
    if host is None or host.state in ("unknown", "evicted", "gone"):
        return
    turn.set_host(event.host, state="unknown", why="nothing has been heard of it for a while")
    turn.note("driver", f"nothing is heard of {event.host}", Where(event.host))
    if turn.state.has_place(event.host) and turn.state.phase in ("starting", "running"):
        turn.alert("warning", "nothing is heard of it; it stays in the job while steps advance", event.host)


def on_gone(turn: Turn, event: HostGone) -> None:
    """The back end says that a host is gone."""
    state, name = turn.state, event.host
    host = state.hosts.get(name)
    if host is None or host.state in ("evicted", "gone"):
        return
    why = f"gone: {event.why}" if event.why else "gone"
    takes_part = state.has_workers and state.has_place(name)
    turn.remove_host(name, "gone", why)
    text = f"{name} is {why}"
    if takes_part and state.ending is None and recovery.see(turn, "failure", "back end", text, Where(name)):
        recovery.add_lost(turn, name, why)
    elif not takes_part:
        turn.note("back end", text, Where(name))


def on_check_passed(turn: Turn, event: CheckPassed) -> None:
    """A host may take part."""
    state, name = turn.state, event.host
    check = state.checks.get(name)
    if check is None or check.number != event.number:
        return
    if not host_checks.takes(turn, event) and name in state.awaited:
        turn.note(f"{check.kind} check of {name}", "passed", Where(name))
    _may_take_part(turn, name)


def _may_take_part(turn: Turn, name: str) -> None:
    """Its check is over."""
    turn.drop_check(name)
    if name in turn.state.awaited:
        turn.no_longer_awaited(name)
        turn.set_host(name, state="draining" if turn.state.hosts[name].leaves else "active", why="")
    else:
        host_checks.passes(turn)
        turn.set_host(name, state="spare", why="ready")


def on_check_failed(turn: Turn, event: CheckFailed) -> None:
    """A host must not take part, unless it is the network between it and another that is bad."""
    state, name = turn.state, event.host
    check = state.checks.get(name)
    if check is None or check.number != event.number:
        return
    if event.is_between and host_checks.takes(turn, event):
        _may_take_part(turn, name)
        return
    why = f"it has not passed its {check.kind} check: {event.why}"
    if name not in state.awaited and state.policy.advise_only:
        turn.drop_check(name)
        turn.set_host(name, state="spare", why=why)
        turn.alert("warning", f"{why}; it would be evicted", name)
        return
    turn.note(f"{check.kind} check of {name}", f"not passed: {event.why}", Where(name))
    said = f"it has not passed its {check.kind} check"
    host_checks.fails(turn, name, why, said, is_of_recovery=name in state.awaited)


def are_late(turn: Turn, late: list[str]) -> None:
    """The limit of these hosts' checks has passed without an answer."""
    state = turn.state
    asked = dict.fromkeys(name for name in late if name in state.awaited and not state.checks[name].is_extended)
    if escalation.is_driver_cut_off(state, len(asked)):
        wait_s = state.policy.cut_off_s
        why = f"{len(asked)} of {len(state.placement)} hosts do not answer their checks"
        turn.alert("error", f"{why}; it may be the driver that is cut off: it waits {wait_s:.0f} s")
        turn.decided("no host is given back yet", f"{why}: a common cause")
        waits_s = dict.fromkeys(asked, wait_s)
    else:
        heard = [name for name in asked if _may_be_busy(turn, name)]
        waits_s = dict.fromkeys(heard, 2 * state.policy.quick_check_s)
        for name in heard:
            why = "its quick check is late, and its executor is heard of: it is asked again, with twice the time"
            turn.decided(f"{name} is not given back yet", why)
    for name, wait_s in waits_s.items():
        _wait_longer(turn, name, wait_s)
    for name in late:
        if name not in waits_s:
            not_checked(turn, name)


def _may_be_busy(turn: Turn, name: str) -> bool:
    """Whether an executor lives and only its measurement is late: seconds of work on a machine that others use too."""
    return turn.state.checks[name].kind == "quick" and turn.state.hosts[name].state != "unknown"


def _wait_longer(turn: Turn, name: str, wait_s: float) -> None:
    """Ask for the same check once more."""
    check = replace(turn.state.checks[name], deadline_s=turn.now_s + wait_s, is_extended=True)
    turn.await_check(name, check)
    turn.act(Check(name, check.number, check.kind, check.peers))


def not_checked(turn: Turn, name: str) -> None:
    """The limit of a check has passed without an answer."""
    state = turn.state
    why = f"it did not answer its {state.checks[name].kind} check in time"
    if state.policy.advise_only and name not in state.awaited:
        turn.drop_check(name)
        turn.alert("warning", f"{why}; it would be given back", name)
        return
    turn.decided(f"{name} is given back", why)
    turn.alert("warning", f"{why}; it is given back", name)
    turn.release(name, why)


def on_slow(turn: Turn, event: SlowHost) -> None:
    """A host is slower than the others: tell it, and replace it where the policy has it so."""
    state = turn.state
    host = state.hosts.get(event.host)
    if host is None or state.phase != "running" or not state.has_place(event.host) or host.leaves:
        return
    text = f"a step on it takes {event.factor:.2f} times as long as on the others. {event.why}".strip()
    policy = state.policy
    if not policy.replace_slow or event.factor < policy.slow_factor:
        turn.alert("warning", text, event.host)
    elif policy.advise_only:
        turn.alert("warning", f"{text}; it would be replaced", event.host)
    else:
        turn.alert("warning", f"{text}; it is replaced as soon as a spare is ready", event.host)
        turn.set_host(event.host, leaves=f"slow: {text}", state="draining" if host.state == "active" else host.state)


def on_joined_after_end(turn: Turn, event: HostJoined) -> None:
    """There is nothing to do for it any more."""
    turn.act(Release(event.host, "the job has ended"))
