"""Whether a snapshot is to be taken now, and whether it is to become a durable checkpoint; and what storage can keep up
with where more is due. Pure. Torch-free.

Something stays due until it was taken: `last` is the moment of the one that *was* taken, so a snapshot for which there
was no free slot at its step is taken a step or two later, and the one after it is due where it would have been. Where
storage cannot keep up, one is therefore taken whenever the one before it is durable: as evenly as storage goes.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.core import units

_SEEN = 3  # durable checkpoints that count: the last ones, by their median
_LATE = 2  # in a row that come too late, before storage is said to be too slow
_TOLERANCE = 1.1  # and a step: what is a little later than asked for keeps up
_CHANGE = 2.0  # factor by which what storage can keep up with has to change to be said again


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


class KeepingUp:
    """Whether durable checkpoints come as often as settings ask for them, and what storage can keep up with.

    Args:
        config: `every_steps` and `every_s` ask.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._begun: deque[Moment] = deque(maxlen=_SEEN + 1)
        self._took_s: deque[float] = deque(maxlen=_SEEN)
        self._said = 0.0

    def took(self, now: Moment) -> None:
        """A durable checkpoint was begun; that of one step again, if nothing came of it."""
        if not self._begun or now.step > self._begun[-1].step:
            self._begun.append(now)

    def durable(self, seconds: float) -> None:
        """One has become durable, so long after it was begun."""
        self._took_s.append(seconds)

    @property
    def explanation(self) -> str:
        """One line about it for people; empty while storage keeps up, or nobody can know."""
        steps = self._late_steps()
        if not steps:
            return ""
        asked_steps, setting = self._asked()
        every = f"{_ordinal(round(steps))} step becomes durable"
        asked = f"{setting} asks for one every {units.duration(asked_steps * self._step_s)}"
        return f"a checkpoint takes {units.duration(median(self._took_s))}; {asked}: about every {every}"

    def news(self) -> str:
        """The line, where it is to be said: when storage cannot keep up any more, or with much more or less."""
        steps = self._late_steps()
        if steps and self._said and 1 / _CHANGE < steps / self._said < _CHANGE:
            return ""
        self._said = steps
        return self.explanation

    @property
    def _step_s(self) -> float:
        """How long a step takes, with all that goes on beside it."""
        first, last = self._begun[0], self._begun[-1]
        return (last.clock_s - first.clock_s) / (last.step - first.step)

    def _asked(self) -> tuple[float, str]:
        """How many steps lie between what the settings ask for, and the setting that asks for most."""
        config, step_s = self._config, self._step_s
        asked = [(float(config.every_steps), f"every_steps = {config.every_steps}")] if config.every_steps else []
        if config.every_s:
            asked.append((max(config.every_s / step_s, 1.0) if step_s else 1.0, f"every_s = {config.every_s:g}"))
        return min(asked)

    def _late_steps(self) -> float:
        """The usual number of steps between two, where that is more than what is asked for; else 0."""
        spacings = [now.step - last.step for last, now in pairwise(self._begun)]
        if len(spacings) < _LATE or not self._took_s or not (self._config.every_steps or self._config.every_s):
            return 0.0
        allowed = self._asked()[0] * _TOLERANCE + 1
        return median(spacings) if min(spacings[-_LATE:]) > allowed else 0.0


def _ordinal(number: int) -> str:
    """``19th``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number:,}{ending}"
