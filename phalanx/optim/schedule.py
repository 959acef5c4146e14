"""Learning rate and batch size as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Iterator

from phalanx.core.errors import UserError
from phalanx.optim.config import BatchWarmupConfig, ScheduleConfig


def warmup_steps(config: ScheduleConfig, total_steps: int) -> int:
    """Steps of warm-up in a run of `total_steps`."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    return round(config.warmup_fraction * total_steps)


def lr_factor(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """The factor on the peak learning rate in step `step`, counted from 0.

    The warm-up reaches 1 in its last step; the decay starts at 1 in the step after it and would reach ``min_ratio`` in
    step `total_steps`, one past the last, so that no step is spent on a rate of 0.

    Raises:
        UserError: the warm-up is longer than the run, or meets the decay of ``wsd``.
    """
    warmup = warmup_steps(config, total_steps)
    decay = max(round(config.decay_fraction * total_steps), 1) if config.kind == "wsd" else 0
    if warmup and warmup + decay > total_steps:
        what = f"and a decay of {decay} steps do" if decay else "does"
        raise UserError(
            f"{what} not fit a run of {total_steps} steps",
            cure="warm up for fewer steps or train longer",
            field="optim.schedule.warmup_steps",
            value=warmup,
        )
    # Counted from 1: a first step at a rate of 0 would change nothing.
    if step < warmup:
        return (step + 1) / warmup
    if config.kind == "constant":
        return 1.0
    start = total_steps - decay if config.kind == "wsd" else warmup
    # Bounded, so that steps beyond the end, of a run that goes on longer, stay at `min_ratio`; a run that is all
    # warm-up has no decay to divide by.
    done = min(max(step - start, 0) / max(total_steps - start, 1), 1.0)
    shape = config.decay_shape if config.kind == "wsd" else config.kind
    # "sqrt" falls fastest at its beginning (Hägele et al., arXiv 2405.18392).
    if shape == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * done))
    else:
        left = 1 - math.sqrt(done) if shape == "sqrt" else 1 - done
    return config.min_ratio + (1 - config.min_ratio) * left


def batch_size(config: BatchWarmupConfig, step: int, full: int) -> int:
    """Sequences of the global batch in step `step`, counted from 0; `full` once the warm-up is over.

    Raises:
        UserError: the warm-up starts above the full batch.
    """
    for size, steps in _stages(config, full):
        if step < steps:
            return size
        step -= steps
    return full


def samples_before(config: BatchWarmupConfig, step: int, full: int) -> int:
    """Sequences that all steps before `step` read."""
    samples = 0
    for size, steps in _stages(config, full):
        samples += size * min(step, steps)
        step -= min(step, steps)
    return samples + step * full


def steps_for_samples(config: BatchWarmupConfig, samples: int, full: int) -> int:
    """The least number of steps that read at least `samples` sequences."""
    total = 0
    for size, steps in _stages(config, full):
        if samples <= size * steps:
            return total + math.ceil(samples / size)
        total, samples = total + steps, samples - size * steps
    return total + math.ceil(samples / full)


def _stages(config: BatchWarmupConfig, full: int) -> Iterator[tuple[int, int]]:
    """``(sequences per step, steps)`` of every stage of the warm-up."""
    if not config.start:
        return
    if config.start > full:
        raise UserError(
            f"is more than the full batch of {full}",
            cure=f"start with at most {full} sequences, or 0 for no warm-up",
            field="optim.batch_warmup.start",
            value=config.start,
        )
    # A stage that is given in samples takes fewer steps the larger its batch is.
    for size in range(config.start, full, config.increment):
        yield size, config.every_steps or math.ceil(config.every_samples / size)
