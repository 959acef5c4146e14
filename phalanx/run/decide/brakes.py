"""What keeps a job from restarting for ever. Pure; torch-free.

A restart was worth it if the attempt got further than all before it. Where a script numbers its steps from the
beginning of the training that is seen: a step that none has made, or a newer checkpoint that the next attempt goes on
from. Where it does not, a newer checkpoint is seen if our library restores it (`Restored`), and more steps than any
attempt has made are; and one that has made steps for `Policy.healthy_s` has lived too long for a crash loop: it may
well have written checkpoints that nobody here can see.
"""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.run.decide.policy import Policy
from phalanx.run.decide.state import Brakes, Ending, Progress, State


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
