"""What to do about a fault, by how often it has come: the ladder. Pure; torch-free.

Who is at fault, and how often it was, says `phalanx.run.decide.blame`.

Restart in place → active checks of the suspect → evict it → evict the group that shares the fault → the previous
version of the code. When to stop is the brakes' to say (`phalanx.run.decide.brakes`).
"""

from __future__ import annotations

import msgspec

from phalanx.run.decide import brakes
from phalanx.run.decide.blame import Blame, culprits
from phalanx.run.decide.placement import can_spare
from phalanx.run.decide.policy import CheckKind
from phalanx.run.decide.state import Recovery, State


class Plan(msgspec.Struct, frozen=True):
    """What is to be done once no process of the attempt is left.

    Attributes:
        what: is to be done, in words for people.
        why: the same way.
        checks: hosts to be checked, and how.
        evict: hosts to be evicted, and why.
        use_previous: go on with the previous version of the code.
        marks: keys of the history to which this fault is added.
        is_between: the hosts of `checks` are tested with each other, too.
    """

    what: str
    why: str
    checks: dict[str, CheckKind] = {}
    evict: dict[str, str] = {}
    use_previous: bool = False
    marks: tuple[str, ...] = ()
    is_between: bool = False


def plan(state: State, recovery: Recovery) -> Plan:
    """Choose the rungs of this recovery."""
    leave = {**recovery.evict, **{host: f"{why}; the kernel does not let go" for host, why in recovery.stuck.items()}}
    found = _by_history(state, recovery, leave)
    if found.use_previous or not brakes.can_go_back(state) or not brakes.is_last(state.policy, brakes.pressed(state)):
        return found
    so_far = msgspec.structs.replace(found, why=f"{found.why}; and no restart has brought progress")
    return _with_previous(state, so_far)


def _by_history(state: State, recovery: Recovery, leave: dict[str, str]) -> Plan:
    """The rungs, by how often who is blamed has been at fault."""
    blamed = culprits(state, recovery)
    if not blamed:
        return _nobody(state, recovery, leave)
    if len(blamed) > most_to_blame(state):
        why = f"{len(blamed)} of {len(state.placement)} hosts at once: a common cause, no host is blamed"
        what = "all of them restart in place after a passive check"
        return Plan(what, why, dict.fromkeys(blamed, "passive"), leave)
    marks = tuple(dict.fromkeys(mark for blame in blamed.values() for mark in blame.marks))
    if max(blame.level for blame in blamed.values()) >= 3:
        return _shared(state, recovery, blamed, leave, marks)
    return _each(state, blamed, leave, marks)


def is_stillness(recovery: Recovery) -> bool:
    """Whether nothing is known but that the job stood still."""
    told = recovery.suspects or recovery.failures or recovery.lost or recovery.stuck or recovery.evict
    return recovery.cause == "hang" and not told


def most_to_blame(state: State) -> int:
    """So many hosts may be at fault at once; more have a common cause."""
    return max(2, len(state.placement) // 8)


def is_driver_cut_off(state: State, silent: int) -> bool:
    """Whether so many hosts that do not answer say more of the driver's own network, in a job that goes on."""
    return state.ending is None and silent > most_to_blame(state) and 2 * silent > len(state.placement)


def _nobody(state: State, recovery: Recovery, leave: dict[str, str]) -> Plan:
    """Nobody who is still there is to blame."""
    if recovery.lost or leave:
        what = "the hosts that are lost are replaced, the others restart in place"
        return Plan(what, "nobody who is still there is to blame", {}, leave)
    everyone = [host for host in state.placement if state.hosts[host].state in ("active", "draining", "suspect")]
    checks: dict[str, CheckKind] = dict.fromkeys(everyone, "passive")
    what = "all restart in place after passive checks"
    if any(failure.kind == "left" for failures in recovery.failures.values() for failure in failures):
        return Plan(what, "the script let it go, so no host is at fault", checks)
    mark = "stillness" if is_stillness(recovery) else "everyone"
    count = state.count(mark)
    if count == 0:
        return Plan(what, "nobody stands out", checks, marks=(mark,))
    if count == 1:
        active: dict[str, CheckKind] = dict.fromkeys(everyone, state.policy.active_check)
        is_between = len(everyone) > 1
        what = "active checks of all" + (", and of the network between them in two rounds" if is_between else "")
        return Plan(what, "again nobody stands out", active, marks=(mark,), is_between=is_between)
    if is_stillness(recovery):
        return Plan(
            "all restart in place", "it stood still once more, which blames nobody and ends no job", marks=(mark,)
        )
    return _last_rungs(state, Plan("", "nobody stands out, more than twice", marks=("everyone",)))


def _each(state: State, blamed: dict[str, Blame], leave: dict[str, str], marks: tuple[str, ...]) -> Plan:
    """Restart in place, check, or evict, each suspect for itself."""
    levels = {host: blame.level for host, blame in blamed.items()}
    bad = {host for host, level in levels.items() if level == 2}
    if bad and not can_spare(state, bad | set(leave)):
        levels = {host: min(level, 1) for host, level in levels.items()}
    words = {host: _words(state, host, level, blamed[host].why, host in bad) for host, level in levels.items()}
    checks: dict[str, CheckKind] = {
        host: "passive" if level == 0 else state.policy.active_check for host, level in levels.items() if level < 2
    }
    evict = {host: words[host][1] for host, level in levels.items() if level == 2}
    what, why = ("; ".join(parts) for parts in zip(*words.values(), strict=True))
    return Plan(what, why, checks, {**leave, **evict}, marks=marks)


def _words(state: State, host: str, level: int, why: str, is_bad: bool) -> tuple[str, str]:
    """What is done with a host, and why."""
    if level == 0:
        what = f"{host} restarts in place after a passive check"
        return what, why or f"{host}: first fault, and only of a process"
    if level == 2:
        return f"{host} is replaced", why or f"{host}: at fault again although its checks passed"
    if is_bad:
        why = f"{host}: at fault again although its checks passed, but nothing can replace it"
        return f"{host} is checked once more", why
    return f"a {state.policy.active_check} check of {host} comes first", why or f"{host}: suspected"


def _shared(
    state: State, recovery: Recovery, blamed: dict[str, Blame], leave: dict[str, str], marks: tuple[str, ...]
) -> Plan:
    """The fault came back on another host: it is of the group, or of the code."""
    group = [host for host in recovery.group_hosts if state.hosts[host].state not in ("gone", "evicted")]
    is_first = state.count(f"evicted group {recovery.group}") == 0
    if group and is_first and 2 * len(group) <= len(state.placement) and can_spare(state, {*group, *leave}):
        why = f"the fault stays with {recovery.group} whichever host it has"
        evict = {**leave, **dict.fromkeys(group, why)}
        what = f"all hosts of {recovery.group} are replaced"
        return Plan(what, why, evict=evict, marks=(*marks, f"evicted group {recovery.group}"))
    checks: dict[str, CheckKind] = {host: state.policy.active_check for host in blamed if host not in leave}
    return _last_rungs(state, Plan("", "the fault stays whichever host it meets", checks, leave, marks=marks))


def _last_rungs(state: State, so_far: Plan) -> Plan:
    """The previous version of the code, if one is given; else restart in place, as long as the brakes let it."""
    if brakes.can_go_back(state):
        return _with_previous(state, so_far)
    return msgspec.structs.replace(so_far, what="restart in place")


def _with_previous(state: State, so_far: Plan) -> Plan:
    what = f"back to the previous version of the code ({state.job.previous_version})"
    return msgspec.structs.replace(so_far, what="; ".join(filter(None, (so_far.what, what))), use_previous=True)


def with_marks(state: State, marks: tuple[str, ...]) -> dict[str, tuple[float, ...]]:
    """The history with a fault more for each of these, and without what is too old to count."""
    oldest_s = state.now_s - state.policy.fault_window_s
    history = {mark: tuple(t for t in times if t >= oldest_s) for mark, times in state.history.items()}
    for mark in marks:
        history[mark] = (*history.get(mark, ()), state.now_s)
    return {mark: times for mark, times in history.items() if times}
