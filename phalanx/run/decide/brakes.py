"""What keeps a job from restarting for ever. Pure; torch-free."""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.run.decide.policy import Policy
from phalanx.run.decide.state import Brakes, Ending, Progress, State


def advanced(progress: Progress, step: int, is_absolute: bool) -> Progress:
    """Progress after a step has been heard of."""
    if not is_absolute:
        return replace(progress, done=max(step, progress.done), is_absolute=False)
    is_new = progress.is_new or step > progress.best
    best = max(step, progress.best)
    return Progress(best, max(step, progress.done), True, progress.last_done, is_new)


def begun(progress: Progress) -> Progress:
    """Progress at the beginning of the next attempt."""
    last_done = progress.done if progress.done >= 0 else progress.last_done
    return Progress(best=progress.best, last_done=last_done)


def has_progressed(progress: Progress) -> bool:
    """Whether the present attempt got further than those before.

    Where steps are counted from the beginning of a process it is believed, unless the attempt ends after exactly as
    many steps as the one before: a script that comes to the same place each time.
    """
    if progress.is_absolute:
        return progress.is_new
    return progress.done > 0 and progress.done != progress.last_done


def pressed(state: State) -> Brakes:
    """The brakes with one recovery more."""
    idle = 1 if has_progressed(state.progress) else state.brakes.idle + 1
    not_before_s = state.now_s + backoff_s(state.policy, idle)
    return Brakes(idle, state.brakes.recoveries + 1, not_before_s, state.brakes.unfit)


def counted(state: State) -> Brakes:
    """The same, where it says nothing of whether the job can run: it counts in `Policy.max_restarts` alone."""
    return replace(state.brakes, recoveries=state.brakes.recoveries + 1, not_before_s=state.now_s)


def backoff_s(policy: Policy, idle: int) -> float:
    """Pause before the restart after so many recoveries without a new step; the first has none."""
    if idle <= 1:
        return 0.0
    return min(policy.backoff_limit_s, policy.backoff_s * 2.0 ** min(idle - 2, 60))


def most_unfit(state: State) -> int:
    """So many hosts may come one after another and not pass their check; with more it is not the hosts."""
    return max(3, state.job.hosts // 8)


def verdict(policy: Policy, brakes: Brakes) -> Ending | None:
    """How the job has to end because it restarts too often; None: it may go on."""
    if brakes.idle > policy.max_restarts_without_step:
        count = policy.max_restarts_without_step
        return Ending(4, f"no new step after {count} restarts (max_restarts_without_step)")
    if policy.max_restarts and brakes.recoveries > policy.max_restarts:
        return Ending(4, f"{policy.max_restarts} restarts in all are used up (max_restarts)")
    return None
