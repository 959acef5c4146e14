"""Restart, check, evict, go back: what to do about a fault by how often it has come, and when to stop restarting.

What keeps a job from restarting for ever.

A restart was worth it if the attempt got further than all before it. Where a script numbers its steps from the
beginning of the training that is seen: a step that none has made, or a newer checkpoint that the next attempt goes on
from. Where it does not, a newer checkpoint is seen if our library restores it (`Restored`), and more steps than any
attempt has made are; and one that has made steps for `Policy.healthy_s` has lived too long for a crash loop: it may
well have written checkpoints that nobody here can see.

What to do about a fault, by how often it has come: the ladder.

Who is at fault, and how often it was, says `phalanx.run.decide.fault_attribution`.

Restart in place → active checks of the suspect → evict it → evict the group that shares the fault → the previous
version of the code. When to stop is the brakes' to say (`phalanx.run.decide.escalation`).

Sentences for people about a recovery: what was seen, and what would be done.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from phalanx.run.decide import fault_attribution
from phalanx.run.decide.fault_attribution import Blame, culprits
from phalanx.run.decide.policy import CheckKind, Policy
from phalanx.run.decide.state import Brakes, Ending, Failure, Progress, Recovery, State, can_spare


def advanced(progress: Progress, step: int, is_absolute: bool, now_s: float) -> Progress:
    """Progress after a step that was made at this time."""
    done = max(step, progress.done)
    since_s = now_s if progress.since_s is None else progress.since_s
    lived_s = max(now_s - since_s, 0.0) if done > progress.done else progress.lived_s
    now = replace(progress, done=done, is_absolute=is_absolute, since_s=since_s, lived_s=lived_s)
    if not is_absolute:
        return now
    return replace(now, best=max(step, progress.best), is_new=progress.is_new or step > progress.best)


def begun(progress: Progress, policy: Policy) -> Progress:
    """Progress at the beginning of the next attempt."""
    done = -1 if progress.is_absolute else progress.done
    return Progress(
        best=progress.best,
        most=max(progress.most, done),
        last_done=done if done >= 0 else progress.last_done,
        base=progress.base,
        was_new=has_progressed(progress, policy),
    )


def went_on_from(state: State, step: int) -> State:
    """The present attempt has gone on after this step of the training; a newer checkpoint is the last one's merit."""
    progress = state.progress
    is_newer = 0 <= progress.base < step and not progress.was_new
    return replace(
        state,
        progress=replace(progress, base=max(step, progress.base)),
        brakes=_released(state.brakes) if is_newer else state.brakes,
    )


def _released(brakes: Brakes) -> Brakes:
    return replace(brakes, idle=min(brakes.idle, 1), struck=())


def has_progressed(progress: Progress, policy: Policy) -> bool:
    """Whether the present attempt got further than all before it, as far as can be told, or lived too long for a loop.

    Attempts that end after exactly as many steps of theirs, one after another, have come to the same place, however
    long they lived.
    """
    return got_further(progress) or is_healthy(progress, policy)


def got_further(progress: Progress) -> bool:
    """The same by steps and checkpoints alone."""
    return progress.is_new or (not progress.is_absolute and progress.done > max(progress.most, 0))


def is_healthy(progress: Progress, policy: Policy) -> bool:
    """The same by its life alone, which counts only where steps and checkpoints do not tell."""
    is_elsewhere = progress.done != progress.last_done
    return not progress.is_absolute and is_elsewhere and progress.lived_s >= policy.healthy_s


def may_restart(progress: Progress) -> bool:
    """Whether the present attempt has made enough of its steps to be restarted on purpose."""
    return progress.is_new if progress.is_absolute else progress.done > 0


def pressed(state: State) -> Brakes:
    """The brakes with one recovery more."""
    brakes, struck = state.brakes, _struck_by_chance(state)
    if has_progressed(state.progress, state.policy):
        idle, struck = 1, ()
    else:
        idle = max(brakes.idle, 1) if struck else brakes.idle + 1
    not_before_s = state.now_s + backoff_s(state.policy, idle)
    recoveries = brakes.recoveries + 1
    return Brakes(idle, recoveries, not_before_s, brakes.unfit, (*brakes.struck, *struck) if idle > 1 or struck else ())


def _struck_by_chance(state: State) -> tuple[int, ...]:
    """Places that have lost their hosts in an attempt that made steps, each for the first time since the last progress.

    Few scripts take hosts away; hardware fails at one place after another. There is an end to that too.
    """
    recovery = state.recovery
    if recovery is None or recovery.cause != "failure" or state.progress.done <= 0:
        return ()
    if any(not failure.follows for failures in recovery.failures.values() for failure in failures):
        return ()
    places = {state.place_of(host) for host in recovery.lost}
    struck = state.brakes.struck
    return () if places & set(struck) or len(places) + len(struck) > most_unfit(state) else tuple(sorted(places))


def counted(state: State) -> Brakes:
    """The same, where it says nothing of whether the job can run: it counts in `Policy.max_restarts` alone."""
    return replace(state.brakes, recoveries=state.brakes.recoveries + 1, not_before_s=state.now_s)


def backoff_s(policy: Policy, idle: int) -> float:
    """Pause before the restart after so many recoveries without progress; the first has none."""
    if idle <= 1:
        return 0.0
    return min(policy.backoff_limit_s, policy.backoff_s * 2.0 ** min(idle - 2, 60))


def most_unfit(state: State) -> int:
    """So many hosts may fail one after another, when they come or in a row without progress; more have a cause."""
    return max(3, state.job.hosts // 8)


def can_go_back(state: State) -> bool:
    """Whether there is a previous version of the code that has not been tried."""
    return bool(state.job.previous_version) and not state.version


def is_last(policy: Policy, brakes: Brakes) -> bool:
    """Whether the next restart is the last that may be without progress."""
    return brakes.idle >= policy.max_restarts_without_step


def verdict(policy: Policy, brakes: Brakes) -> Ending | None:
    """How the job has to end because it restarts too often; None: it may go on."""
    if brakes.idle > policy.max_restarts_without_step:
        count = policy.max_restarts_without_step
        why = "no step that none had made before, and no newer checkpoint"
        return Ending(4, f"no progress in {count} restarts: {why} (max_restarts_without_step)")
    if policy.max_restarts and brakes.recoveries > policy.max_restarts:
        return Ending(4, f"{policy.max_restarts} restarts in all are used up (max_restarts)")
    return None


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


def plan_recovery(state: State, recovery: Recovery) -> Plan:
    """Choose the rungs of this recovery."""
    leave = {**recovery.evict, **{host: f"{why}; the kernel does not let go" for host, why in recovery.stuck.items()}}
    found = _by_history(state, recovery, leave)
    if found.use_previous or not can_go_back(state) or not is_last(state.policy, pressed(state)):
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
    marks = tuple(dict.fromkeys(mark for at_fault in blamed.values() for mark in at_fault.marks))
    if max(at_fault.level for at_fault in blamed.values()) >= 3:
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
    levels = {host: at_fault.level for host, at_fault in blamed.items()}
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
    if can_go_back(state):
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


_NAMES_SHOWN = 5
_SAID_CHARACTERS = 160


def names(hosts: Iterable[str]) -> str:
    """Such as ``a, b, c and 497 more``."""
    every = list(hosts)
    more = len(every) - _NAMES_SHOWN
    return ", ".join(every[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def of_failure(host: str, failure: Failure) -> str:
    """Such as ``rank 3 on node7: killed by SIGKILL (step 12)``."""
    who = f"rank {failure.rank} on {host}" if failure.rank >= 0 else host
    return f"{who}: {failure.summary}" + (f" (step {failure.step})" if failure.step >= 0 else "")


def read_log(rank: int, said: str = "") -> str:
    """What a person should do about a rank that its own script has ended; `said`: its last words, in one line."""
    return f"read the log of rank {rank}{f' ({said[:_SAID_CHARACTERS]})' if said else ''}: phalanx run logs {rank}"


def together(state: State) -> str:
    """What single lines of the report do not say: how many ranks have failed, and how; empty: nothing more."""
    recovery = state.recovery
    if recovery is None:
        return ""
    own = [(host, f) for host, failures in recovery.failures.items() for f in failures if not f.follows]
    follow = sum(f.follows for failures in recovery.failures.values() for f in failures)
    parts = [f"{len(own)} ranks failed by themselves, first {of_failure(*own[0])}"] if len(own) > 1 else []
    parts += [f"{follow} {'rank' if follow == 1 else 'ranks'} failed only because a peer was gone"] if follow else []
    parts += [f"shared by {recovery.group}"] if recovery.group else []
    return "; ".join(parts)


def would_do(state: State) -> str:
    """What would be done now if the policy did more than advise."""
    recovery = state.recovery
    if recovery is None:
        return "nothing would be done"
    ending = fault_attribution.verdict(state) or verdict(state.policy, pressed(state))
    if ending is not None:
        return f"all workers would be stopped and the job ended with status {ending.status}: {ending.reason}"
    first = "evidence would be gathered, then " if recovery.cause == "hang" else ""
    plan = plan_recovery(state, recovery)
    return f"{first}all workers would be stopped, and then: {plan.what} ({plan.why})"
