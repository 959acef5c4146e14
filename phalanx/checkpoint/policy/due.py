"""Whether a snapshot is to be taken now, and whether it is to become a durable checkpoint; pure functions. Torch-free.

Something stays due until it was taken: `last` is the moment of the one that *was* taken, so a snapshot for which there
was no free slot at its step is taken a step or two later, and the one after it is due where it would have been.
"""

from __future__ import annotations

from typing import NamedTuple

from phalanx.checkpoint.config import CheckpointConfig


class Moment(NamedTuple):
    """A point of a run.

    Attributes:
        step: optimizer steps done.
        clock_s: of a clock that never goes back; only differences count.
    """

    step: int
    clock_s: float


def durable_due(config: CheckpointConfig, now: Moment, last: Moment, auto_steps: int = 0) -> bool:
    """Whether a durable checkpoint is due.

    Args:
        config: `every_steps`, `every_s` and `auto` decide.
        now: where training stands.
        last: where it stood when the last durable checkpoint was begun, or where it was resumed or began.
        auto_steps: the interval that `phalanx.checkpoint.policy.interval` chose; 0: none yet. Counts with `auto` only.
    """
    if now.step <= last.step:
        return False
    by_time = config.every_s > 0 and now.clock_s - last.clock_s >= config.every_s
    by_choice = config.auto and auto_steps > 0 and now.step - last.step >= auto_steps
    return by_time or by_choice or passed(config.every_steps, now.step, last.step)


def snapshot_due(
    config: CheckpointConfig, now: Moment, last: Moment, last_durable: Moment, auto_steps: int = 0
) -> bool:
    """Whether a snapshot is due: for memory, or because a durable checkpoint is (see `durable_due`).

    Args:
        last: where training stood when the last snapshot was taken, durable or not.
    """
    in_memory = now.step > last.step and passed(config.memory_every_steps, now.step, last.step)
    return in_memory or durable_due(config, now, last_durable, auto_steps)


def passed(every: int, step: int, last_step: int) -> bool:
    """Whether there is a multiple of `every` in ``(last_step, step]``; never with `every` 0."""
    return every > 0 and step // every > last_step // every
