"""Who is at fault, what to do about it by how often the fault has come, and when to stop restarting.

**Who is at fault** for what ended ranks: the machine, or the program that ran on it.

- The **machine** reports it: its kernel, its sensors, a check, an error of network or storage, a rank that is stopped
  or does not answer. Its host is at fault.
- What the **program** raises, or the status with which it leaves, is its own on whichever host it happens. No host is
  evicted for it; one on which it happens again is checked.
- A rank that **dies** of a signal may do so for either. It is the program's fault if the same rank has died at the same
  step before, or in the same place on another host. It is the host's if it comes there again and again, at different
  steps, while all others have none.

**What to do**: restart in place → active checks of the suspect → evict it → evict the group that shares the fault → the
previous version of the code.

**When to stop.** A restart was worth it if the attempt got further than all before it. Where a script numbers its steps
from the beginning of the training that is seen: a step that none has made, or a newer checkpoint that the next attempt
goes on from. Where it does not, a newer checkpoint is seen if our library restores it (`Restored`), and more steps than
any attempt has made are; and one that has made steps for `Policy.healthy_s` has lived too long for a crash loop: it may
well have written checkpoints that nobody here can see.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec.structs import replace

from phalanx.run.decide.events import LAST_LINE, OF_THE_HOST, CheckKind
from phalanx.run.decide.policy import Policy
from phalanx.run.decide.state import (
    Ending,
    Failure,
    LastFailure,
    Progress,
    Recovery,
    RestartCounts,
    State,
    can_spare,
)

# Whether the user's own code is at fault, so that neither another attempt nor another host helps.

_OWN_KINDS = ("user", "syntax", "raised", "status", "usage", "start", "loss", "left")
_SELF_INFLICTED = ("SIGSEGV", "SIGFPE", "SIGSYS")
"""What a program does to itself: other signals come from outside, or from a machine that differs."""

_DIFFERENT_TEXTS = 64
_DIFFERS_BY_RANK = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


def text_of(failure: Failure) -> str:
    """A failure's text without what differs from rank to rank: numbers, addresses, a last line."""
    if failure.kind == "usage":
        return failure.kind
    return f"{failure.kind}: {_DIFFERS_BY_RANK.sub('#', failure.summary.partition(LAST_LINE)[0])}"[:300]


def _is_of_the_code(failure: Failure) -> bool:
    """Whether a rank reports something of itself that no host can be blamed for."""
    # A loss that is not finite is of the code even with a host's class of fault: a host's would come at another step.
    is_of_a_host = failure.fault in OF_THE_HOST and failure.kind != "loss"
    return failure.kind in _OWN_KINDS and not failure.follows and not is_of_a_host


def with_text(counts: dict[str, int], failure: Failure, ranks: int) -> dict[str, int]:
    """Counts of what ranks report of themselves, with this failure of so many of them."""
    if failure.kind == "loss" or not _is_of_the_code(failure):
        return counts
    text = text_of(failure)
    if text not in counts and len(counts) >= _DIFFERENT_TEXTS:
        return counts
    return {**counts, text: counts.get(text, 0) + ranks}


def verdict_on_code(state: State) -> Ending | None:
    """How the job has to end because of its own code; None: it is not that, as far as can be seen."""
    counts = state.recovery.texts if state.recovery is not None else {}
    text = max(counts, key=lambda text: counts[text], default="")
    common = None
    # One rank may be wrong for many reasons; what more than half of all report alike is the code or its input.
    if 2 * counts.get(text, 0) > state.world_size:
        common = next((failure for failure in _of_the_code(state) if text_of(failure) == text), None)
    if common is not None and common.kind == "syntax":
        return verdict_on_one(state, common) or Ending(1, f"the source is wrong on most ranks: {common.summary}")
    if common is not None and common.kind in ("user", "start", "usage"):
        return Ending(2, f"bad input: {common.summary}")
    if common is not None:
        return Ending(1, f"most ranks ended alike, which no other host would change: {common.summary}")
    endings = (verdict_on_one(state, failure) for failure in failures_of(state))
    return next((ending for ending in endings if ending is not None), None)


def verdict_on_one(state: State, failure: Failure) -> Ending | None:
    """What follows from one failure, whatever the other ranks report."""
    never_ran = not state.progress.has_run
    if failure.kind == "syntax" and never_ran:
        return Ending(1, f"the source is wrong, whichever host runs it: {failure.summary}")
    where = f"step {failure.step}" if failure.step >= 0 else "the beginning"
    again = Ending(1, f"it came back in the next attempt at the same place, {where}: {failure.summary}")
    if failure.kind == "signal" and failure.fault == "process" and any(n in failure.summary for n in _SELF_INFLICTED):
        return again if state.progress.done >= 0 and _came_before(state, failure) else None
    if not _is_of_the_code(failure):
        return None
    if failure.kind == "user" and never_ran:
        return Ending(2, f"bad input: rank {failure.rank} said so before the first step: {failure.summary}")
    last = state.last_failure
    if last is None or last.step != failure.step or last.text != text_of(failure):
        return None
    if failure.kind == "usage" and never_ran:
        return Ending(2, f"bad input: it came back in the next attempt, before any step: {failure.summary}")
    return again


def _step_mark(failure: Failure) -> str:
    """Key of the history for where a rank has died."""
    return f"rank {failure.rank} at step {failure.step}"


def _came_before(state: State, failure: Failure) -> bool:
    """Whether a rank has died where it has died before.

    Two attempts that both end at their first step prove nothing: on a bad host it is so too.
    """
    return failure.step > max(state.progress.base, 0) + 1 and state.count(_step_mark(failure)) > 0


def last_failure(state: State) -> LastFailure | None:
    """What to compare the next recovery with."""
    own = [failure for failure in _of_the_code(state) if failure.kind != "start"]
    first = min(own, key=lambda failure: failure.rank, default=None)
    return None if first is None else LastFailure(text_of(first), first.step, first.kind)


def first_of_the_code(state: State) -> Failure | None:
    """The first rank that reports something for which no host can be blamed, other than a broken loss."""
    own = (failure for failure in _of_the_code(state) if failure.kind not in ("start", "loss") and failure.rank >= 0)
    return next(own, None)


def failures_of(state: State) -> Iterator[Failure]:
    """All failures that are known in this recovery."""
    for failures in state.recovery.failures.values() if state.recovery is not None else ():
        yield from failures


def _of_the_code(state: State) -> Iterator[Failure]:
    return filter(_is_of_the_code, failures_of(state))


# Which hosts are at fault, and how often they were.

_HOSTS_PER_DEATH = 16
"""Of so many other hosts one may have had a death too, for other reasons."""


class Blame(msgspec.Struct, frozen=True):
    """Of one host."""

    # How often it has been at fault, and one more if the first time is serious: 0: restart in place; 1: check; 2:
    # evict; 3: not the host's fault alone.
    level: int
    why: str = ""  # for people; empty: the usual words for that level
    marks: tuple[str, ...] = ()  # keys of the history to which this is added


def _culprits(state: State, recovery: Recovery) -> dict[str, Blame]:
    """Hosts on which something was at fault and that are still there."""
    going = {*recovery.lost, *recovery.stuck, *recovery.evict}  # they leave in any case
    found = {host: _of_machine(state, recovery, host, 1) for host in recovery.suspects if host not in going}
    for host, failures in recovery.failures.items():
        # A loss that is the same on all ranks points to none of them, and a rank that ends well to no host.
        own = [
            f
            for f in failures
            if not f.follows and f.kind != "left" and not (f.kind == "loss" and f.fault == "process")
        ]
        if not own or host in found or host in going:
            continue
        natures = {nature_of(failure) for failure in own}
        base = int(not state.hosts[host].is_proven)  # one more for a host that has never run anything well
        if "machine" in natures:
            base = int(base or any(f.fault in OF_THE_HOST for f in own))
            found[host] = _of_machine(state, recovery, host, base)
        elif "death" in natures:
            found[host] = _of_death(state, host, [f for f in own if nature_of(f) == "death"], base)
        else:
            mark = f"program on {host}"
            why = f"{host}: it was raised by its program, for which no host is evicted"
            found[host] = Blame(min(base + state.count(mark), 1), why, (mark,))
    return found


def nature_of(failure: Failure) -> Literal["machine", "program", "death"]:
    """What a failure of a rank points to."""
    if failure.fault in OF_THE_HOST or failure.rank < 0 or failure.kind in ("start", "silent", "loss"):
        return "machine"
    if failure.kind in ("user", "syntax", "status"):
        return "program"
    # What NCCL or CUDA raise has the class of a process, by the rules for logs: it may be of the GPU.
    return "program" if failure.kind == "raised" and failure.fault == "user" else "death"


def _of_machine(state: State, recovery: Recovery, host: str, base: int) -> Blame:
    # The place counts too: a bad link or cable stays when the host is replaced.
    marks = _marks(state, host)
    if recovery.group and host in recovery.group_hosts:
        marks = (*marks, f"group {recovery.group}")
    return Blame(base + max(map(state.count, marks)), marks=marks)


def _of_death(state: State, host: str, failures: list[Failure], base: int) -> Blame:
    own = state.count(f"host {host}")
    steps = tuple(dict.fromkeys(_step_mark(failure) for failure in failures))
    if any(_came_before(state, failure) for failure in failures):
        return Blame(0, f"{host}: a rank has died at the same step before, which is the program's", steps)
    marks = (*_marks(state, host), f"death on {host}", *steps)
    place = state.count(f"place {state.place_of(host)}") if state.has_place(host) else 0
    if place > own:  # whatever becomes of this host, the next one will have it too
        why = f"{host}: it has come to the same place on another host too"
        return Blame(base + place if base + place >= 3 else min(base + place, 1), why, marks)
    there = (name for name, known in state.hosts.items() if known.state not in ("evicted", "gone"))
    others = sum(state.count(f"death on {name}") for name in there if name != host)
    if base + own >= 2 and others > len(state.placement) // _HOSTS_PER_DEATH:
        return Blame(1, f"{host}: ranks die there and on other hosts too, so it is none of them", marks)
    return Blame(base + own, marks=marks)


def _marks(state: State, host: str) -> tuple[str, ...]:
    """Keys of the history for a host and its place."""
    return (f"host {host}", f"place {state.place_of(host)}") if state.has_place(host) else (f"host {host}",)


# What to do.


class RecoveryPlan(msgspec.Struct, frozen=True):
    """What is to be done once no process of the attempt is left."""

    what: str  # for people, like `why`
    why: str
    checks: dict[str, CheckKind] = {}  # hosts to be checked, and how
    evict: dict[str, str] = {}  # hosts to be evicted, and why
    use_previous: bool = False  # go on with the previous version of the code
    marks: tuple[str, ...] = ()  # keys of the history to which this fault is added
    is_between: bool = False  # the hosts of `checks` are tested with each other, too


def plan_recovery(state: State, recovery: Recovery) -> RecoveryPlan:
    """Choose what to do, by how often those to blame have been at fault."""
    leave = {**recovery.evict, **{host: f"{why}; the kernel does not let go" for host, why in recovery.stuck.items()}}
    blamed = _culprits(state, recovery)
    marks = tuple(dict.fromkeys(mark for at_fault in blamed.values() for mark in at_fault.marks))
    if not blamed:
        plan = _blame_nobody(state, recovery, leave)
    elif len(blamed) > state.most_to_blame:
        # Hosts fail one by one. Very many at once share a switch, a file system, a driver: evicting them mends nothing.
        why = f"{len(blamed)} of {len(state.placement)} hosts at once: a common cause, no host is blamed"
        what = "all of them restart in place after a passive check"
        plan = RecoveryPlan(what, why, dict.fromkeys(blamed, "passive"), leave)
    elif max(at_fault.level for at_fault in blamed.values()) >= 3:
        plan = _blame_group(state, recovery, blamed, leave, marks)
    else:
        plan = _blame_each(state, blamed, leave, marks)
    # The last restart that may be without progress is not spent on the code that has failed all the time.
    is_last = restarts_after(state).idle >= state.policy.max_restarts_without_step
    if not plan.use_previous and _can_go_back(state) and is_last:
        plan = _with_previous(state, replace(plan, why=f"{plan.why}; and no restart has brought progress"))
    return plan


def is_only_standstill(recovery: Recovery) -> bool:
    """Whether nothing is known but that the job stood still."""
    known = recovery.suspects or recovery.failures or recovery.lost or recovery.stuck or recovery.evict
    return recovery.cause == "hang" and not known


def _blame_nobody(state: State, recovery: Recovery, leave: dict[str, str]) -> RecoveryPlan:
    """Nobody who is still there is to blame."""
    if recovery.lost or leave:
        what = "the hosts that are lost are replaced, the others restart in place"
        return RecoveryPlan(what, "nobody who is still there is to blame", {}, leave)
    everyone = [host for host in state.placement if state.hosts[host].state in ("active", "draining", "suspect")]
    checks: dict[str, CheckKind] = dict.fromkeys(everyone, "passive")
    what = "all restart in place after passive checks"
    if any(failure.kind == "left" for failures in recovery.failures.values() for failure in failures):
        return RecoveryPlan(what, "the script let it go, so no host is at fault", checks)
    mark = "stillness" if is_only_standstill(recovery) else "everyone"
    count = state.count(mark)
    if count == 0:
        return RecoveryPlan(what, "nobody stands out", checks, marks=(mark,))
    if count == 1:
        active: dict[str, CheckKind] = dict.fromkeys(everyone, state.policy.active_check)
        is_between = len(everyone) > 1
        what = "active checks of all" + (", and of the network between them in two rounds" if is_between else "")
        return RecoveryPlan(what, "again nobody stands out", active, marks=(mark,), is_between=is_between)
    if mark == "stillness":
        why = "it stood still once more, which blames nobody and ends no job"
        return RecoveryPlan("all restart in place", why, marks=(mark,))
    return _last_resort(state, RecoveryPlan("", "nobody stands out, more than twice", marks=("everyone",)))


def _blame_each(state: State, blamed: dict[str, Blame], leave: dict[str, str], marks: tuple[str, ...]) -> RecoveryPlan:
    """Restart in place, check, or evict, each suspect for itself."""
    levels = {host: at_fault.level for host, at_fault in blamed.items()}
    bad = {host for host, level in levels.items() if level == 2}
    # A job that would have to wait for a host is worse off than one that goes on with a doubtful one.
    if bad and not can_spare(state, bad | set(leave)):
        levels = {host: min(level, 1) for host, level in levels.items()}
    checks: dict[str, CheckKind] = {}
    evict, whats, whys = dict(leave), [], []
    for host, level in levels.items():
        known = blamed[host].why
        if level == 0:
            checks[host], what = "passive", f"{host} restarts in place after a passive check"
            why = known or f"{host}: first fault, and only of a process"
        elif level == 2:
            what = f"{host} is replaced"
            why = evict[host] = known or f"{host}: at fault again although its checks passed"
        else:
            checks[host], what = state.policy.active_check, f"a {state.policy.active_check} check of {host} comes first"
            why = known or f"{host}: suspected"
            if host in bad:
                what = f"{host} is checked once more"
                why = f"{host}: at fault again although its checks passed, but nothing can replace it"
        whats.append(what)
        whys.append(why)
    return RecoveryPlan("; ".join(whats), "; ".join(whys), checks, evict, marks=marks)


def _blame_group(
    state: State, recovery: Recovery, blamed: dict[str, Blame], leave: dict[str, str], marks: tuple[str, ...]
) -> RecoveryPlan:
    """The fault came back on another host: it is of the group, or of the code."""
    group = [host for host in recovery.group_hosts if state.hosts[host].state not in ("gone", "evicted")]
    mark = f"evicted group {recovery.group}"
    is_small = 2 * len(group) <= len(state.placement)
    if group and state.count(mark) == 0 and is_small and can_spare(state, {*group, *leave}):
        # Once only: a fault that stays with a group of other hosts is not of the hosts.
        why = f"the fault stays with {recovery.group} whichever host it has"
        evict = {**leave, **dict.fromkeys(group, why)}
        return RecoveryPlan(f"all hosts of {recovery.group} are replaced", why, evict=evict, marks=(*marks, mark))
    checks: dict[str, CheckKind] = {host: state.policy.active_check for host in blamed if host not in leave}
    return _last_resort(state, RecoveryPlan("", "the fault stays whichever host it meets", checks, leave, marks=marks))


def _last_resort(state: State, plan: RecoveryPlan) -> RecoveryPlan:
    """The previous version of the code, if one is given; else restart in place, as long as the limits let it."""
    return _with_previous(state, plan) if _can_go_back(state) else replace(plan, what="restart in place")


def _can_go_back(state: State) -> bool:
    """Whether there is a previous version of the code that has not been tried."""
    return bool(state.job.previous_version) and not state.version


def _with_previous(state: State, plan: RecoveryPlan) -> RecoveryPlan:
    what = f"back to the previous version of the code ({state.job.previous_version})"
    return replace(plan, what="; ".join(filter(None, (plan.what, what))), use_previous=True)


def history_with(state: State, marks: tuple[str, ...]) -> dict[str, tuple[float, ...]]:
    """The history with a fault more for each of these, and without what is too old to count."""
    oldest_s = state.now_s - state.policy.fault_window_s
    history = {mark: tuple(t for t in times if t >= oldest_s) for mark, times in state.history.items()}
    for mark in marks:
        history[mark] = (*history.get(mark, ()), state.now_s)
    return {mark: times for mark, times in history.items() if times}


# When to stop restarting.


def advanced(progress: Progress, step: int, is_absolute: bool, now_s: float) -> Progress:
    """Progress after a step that was made at this time."""
    done = max(step, progress.done)
    since_s = now_s if progress.since_s is None else progress.since_s
    lived_s = max(now_s - since_s, 0.0) if done > progress.done else progress.lived_s
    now = replace(progress, done=done, is_absolute=is_absolute, since_s=since_s, lived_s=lived_s)
    if not is_absolute:
        return now
    return replace(now, best=max(step, progress.best), is_new=progress.is_new or step > progress.best)


def went_on_from(state: State, step: int) -> State:
    """The present attempt has gone on after this step of the training; a newer checkpoint is the last one's merit."""
    progress, restarts = state.progress, state.restarts
    # Only now it shows that the attempt before has written a checkpoint, so its restart was none without progress.
    if 0 <= progress.base < step and not progress.was_new:
        restarts = replace(restarts, idle=min(restarts.idle, 1), struck=())
    return replace(state, progress=replace(progress, base=max(step, progress.base)), restarts=restarts)


def has_progressed(progress: Progress, policy: Policy) -> bool:
    """Whether the present attempt got further than all before it, as far as can be seen, or lived too long for a loop.

    Attempts that end after exactly as many steps of theirs, one after another, have come to the same place, however
    long they lived.
    """
    return got_further(progress) or is_healthy(progress, policy)


def got_further(progress: Progress) -> bool:
    """The same by steps and checkpoints alone."""
    return progress.is_new or (not progress.is_absolute and progress.done > max(progress.most, 0))


def is_healthy(progress: Progress, policy: Policy) -> bool:
    """The same by its life alone, which counts only where steps and checkpoints do not show it."""
    is_elsewhere = progress.done != progress.last_done
    return not progress.is_absolute and is_elsewhere and progress.lived_s >= policy.healthy_s


def restarts_after(state: State) -> RestartCounts:
    """The counts with one recovery more, and the pause that they ask for."""
    counts, struck = state.restarts, _struck_by_chance(state)
    if has_progressed(state.progress, state.policy):
        idle, struck = 1, ()
    else:
        idle = max(counts.idle, 1) if struck else counts.idle + 1
    # The first restart has no pause: most faults are over with the process. What comes again may need time to pass.
    pause_s = 0.0
    if idle > 1:
        pause_s = min(state.policy.backoff_limit_s, state.policy.backoff_s * 2.0 ** min(idle - 2, 60))
    every = (*counts.struck, *struck) if idle > 1 or struck else ()
    return RestartCounts(idle, counts.recoveries + 1, state.now_s + pause_s, counts.unfit, every)


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
    struck = state.restarts.struck
    return () if places & set(struck) or len(places) + len(struck) > state.most_unfit else tuple(sorted(places))


def verdict_on_restarts(policy: Policy, counts: RestartCounts) -> Ending | None:
    """How the job has to end because it restarts too often; None: it may go on."""
    if counts.idle > policy.max_restarts_without_step:
        count = policy.max_restarts_without_step
        why = "no step that none had made before, and no newer checkpoint"
        return Ending(4, f"no progress in {count} restarts: {why} (max_restarts_without_step)")
    if policy.max_restarts and counts.recoveries > policy.max_restarts:
        return Ending(4, f"{policy.max_restarts} restarts in all are used up (max_restarts)")
    return None


# What people read.


def of_failure(host: str, failure: Failure) -> str:
    """Such as ``rank 3 on node7: killed by SIGKILL (step 12)``."""
    rank = f"rank {failure.rank} on {host}" if failure.rank >= 0 else host
    return f"{rank}: {failure.summary}" + (f" (step {failure.step})" if failure.step >= 0 else "")


def together(recovery: Recovery) -> str:
    """What single lines of the report lack: how many ranks have failed, and how; empty: nothing more."""
    own = [(host, f) for host, failures in recovery.failures.items() for f in failures if not f.follows]
    follow = sum(f.follows for failures in recovery.failures.values() for f in failures)
    parts = [f"{len(own)} ranks failed by themselves, first {of_failure(*own[0])}"] if len(own) > 1 else []
    parts += [f"{follow} {'rank' if follow == 1 else 'ranks'} failed only because a peer was gone"] if follow else []
    parts += [f"shared by {recovery.group}"] if recovery.group else []
    return "; ".join(parts)
