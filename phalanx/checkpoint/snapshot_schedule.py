"""When a snapshot is due, when it becomes a durable checkpoint, and how all ranks agree on both.

Something stays due until it was taken: `last` is the moment of the one that *was* taken, so a snapshot for which there
was no free slot at its step is taken a step or two later, and the one after it is due where it would have been. Where
storage cannot keep up, one is therefore taken whenever the one before it is durable: as evenly as storage goes.

To agree at the end of a step, each rank gives a number, and the highest of all holds. Where only steps count,
all ranks know by themselves at which steps there is something to agree on; where time counts too, rank 0's clock does,
and all ranks agree at every step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.interval import AutoInterval
from phalanx.core import units

_SEEN = 3  # durable checkpoints that count: the last ones, by their median
_LATE = 2  # in a row that come too late, before storage is reported as too slow
_TOLERANCE = 1.1  # and a step: what is a little later than asked for keeps up
_CHANGE = 2.0  # factor by which the pace of storage has to change to be reported again


class Moment(NamedTuple):
    """A point of a run.

    Attributes:
        clock_s: of a clock that never goes back; only differences count.
    """

    step: int
    clock_s: float


def durable_due(config: CheckpointConfig, now: Moment, last: Moment, auto_steps: int = 0) -> bool:
    """Whether a durable checkpoint is due.

    Args:
        last: where training stood when the last durable checkpoint was begun, or where it was resumed or began.
        auto_steps: the interval that `phalanx.checkpoint.interval` chose; 0: none yet. Counts with `auto` only.
    """
    if now.step <= last.step:
        return False
    by_time = config.every_s > 0 and now.clock_s - last.clock_s >= config.every_s
    by_choice = config.auto and auto_steps > 0 and now.step - last.step >= auto_steps
    return by_time or by_choice or _passed(config.every_steps, now.step, last.step)


def _passed(every: int, step: int, last_step: int) -> bool:
    """Whether there is a multiple of `every` in ``(last_step, step]``; never with `every` 0."""
    # Not `step % every`: what could not be taken at its step is still due at the next ones.
    return every > 0 and step // every > last_step // every


class StoragePace:
    """Whether durable checkpoints come as often as settings ask for them, and what storage can keep up with.

    Args:
        config: `every_steps` and `every_s` ask.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._begun: deque[Moment] = deque(maxlen=_SEEN + 1)
        self._durable_s: deque[float] = deque(maxlen=_SEEN)
        self._reported_steps = 0.0

    def note_begun(self, now: Moment) -> None:
        """A durable checkpoint was begun; that of one step again, if nothing came of it."""
        if not self._begun or now.step > self._begun[-1].step:
            self._begun.append(now)

    def note_durable(self, seconds: float) -> None:
        """One has become durable, `seconds` after it was begun."""
        self._durable_s.append(seconds)

    @property
    def explanation(self) -> str:
        """One line about it for people; empty while storage keeps up, or nobody can know."""
        return self._look()[1]

    def new_explanation(self) -> str:
        """The line, where it is news: when storage cannot keep up any more, or with much more or less than reported."""
        steps, line = self._look()
        if steps and self._reported_steps and 1 / _CHANGE < steps / self._reported_steps < _CHANGE:
            return ""
        self._reported_steps = steps
        return line

    def _look(self) -> tuple[float, str]:
        """The usual number of steps between two checkpoints, where that is more than asked for, and the line."""
        every_steps, every_s = self._config.every_steps, self._config.every_s
        spacings = [now.step - last.step for last, now in pairwise(self._begun)]
        if len(spacings) < _LATE or not self._durable_s or not (every_steps or every_s):
            return 0.0, ""
        first, last = self._begun[0], self._begun[-1]
        step_s = (last.clock_s - first.clock_s) / (last.step - first.step)
        asked = [(float(every_steps), f"every_steps = {every_steps}")] if every_steps else []
        if every_s:
            asked.append((max(every_s / step_s, 1.0) if step_s else 1.0, f"every_s = {every_s:g}"))
        # The setting that asks more often decides.
        asked_steps, setting = min(asked)
        # One of the last that came in time is enough: a single slow checkpoint is no news.
        if min(spacings[-_LATE:]) <= asked_steps * _TOLERANCE + 1:
            return 0.0, ""
        steps = median(spacings)
        return steps, (
            f"a checkpoint takes {units.duration(median(self._durable_s))}; {setting} asks for one every "
            f"{units.duration(asked_steps * step_s)}: about every {_ordinal(round(steps))} step becomes durable"
        )


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number:,}{ending}"


FREE = 0  # a snapshot can be taken and made durable
MEMORY_ONLY = 1  # it cannot be made durable: that is not due (by rank 0's clock), or one is on its way
BUSY = 2  # it cannot be taken
RENEWED = 3  # and a keeper is new: the others have to learn where it is


class Decision(NamedTuple):
    """What all ranks do at the end of a step.

    Attributes:
        take: a snapshot.
        persist: and it becomes durable.
        put_off: something was due, as far as this rank knows, and is not done now; it stays due.
    """

    take: bool
    persist: bool
    put_off: bool


class SnapshotSchedule:
    """When what is due.

    Args:
        auto: the interval of ``auto``; only rank 0's counts.
        decides: whether this is rank 0.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        auto: AutoInterval,
        *,
        decides: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self.auto, self._clock = config, auto, clock
        self._by_clock = config.every_s > 0 or config.auto
        # By the clock only rank 0 knows: clocks of ranks differ, and all have to do the same.
        self._knows = decides or not self._by_clock  # what is due to become durable
        self._last: Moment | None = None
        self._last_durable = Moment(0, 0.0)
        self.skipped = 0
        self.pace = StoragePace(config)

    def recall(self, costs: dict[str, Any] | None, hosts: int, *, failed: bool) -> None:
        """Take up what an earlier attempt measured (`AutoInterval.to_json`); `failed`: it ended by a failure."""
        self.auto = AutoInterval(self._config, hosts, costs, failed=failed)

    def begin(self, step: int) -> None:
        """Training stands at `step`, if that was not known yet."""
        if self._last is None:
            self._last = self._last_durable = Moment(step, self._clock())

    def needs_agreement(self, step: int) -> bool:
        """Whether the ranks have to agree at the end of `step`; the same on all."""
        # All ranks have to ask at the same steps: by the clock, which others do not see, that is every step.
        return self._by_clock or self._in_memory_due(step) or self._durable_due(step)

    def waits_until_free(self, step: int) -> bool:
        """Whether training stands still at the end of `step` until this rank is free for what is due there."""
        return self._config.wait and self._durable_due(step)

    def vote(self, step: int, keeper_state: int) -> int:
        """This rank's number there, where its keeper is in `keeper_state` (`FREE` …)."""
        # The highest number of all ranks holds, so rank 0 alone keeps the others from what is not due.
        if self._by_clock and self._knows and not self._durable_due(step):
            return max(keeper_state, MEMORY_ONLY)
        return keeper_state

    def decide(self, step: int, agreed: int) -> Decision:
        """What follows from the highest number of all ranks."""
        in_memory, durable = self._in_memory_due(step), self._knows and self._durable_due(step)
        # By the clock, rank 0 would have voted for less if it were not due.
        persist = agreed == FREE and (self._by_clock or durable)
        take = persist or (agreed <= MEMORY_ONLY and in_memory)
        return Decision(take, persist, ((in_memory or durable) and not take) or (durable and not persist))

    def note_taken(self, step: int, *, persist: bool) -> None:
        """A snapshot of `step` was taken."""
        now = Moment(step, self._clock())
        if persist:
            every = self._config.every_steps
            # Points between the last durable checkpoint and this one, which it stands for as well.
            points = step // every - self._last_durable.step // every if every else 0
            self.skipped += max(points - 1, 0)
            self._last_durable = now
            self.pace.note_begun(now)
        self._last = now

    def note_durable(self, stall_s: float, persist_s: float) -> None:
        """A checkpoint that made training stand still for `stall_s` has become durable `persist_s` after its copy."""
        self.auto.note_stall(stall_s)
        self.auto.note_durable(persist_s)
        self.pace.note_durable(persist_s)

    def _durable_due(self, step: int) -> bool:
        return durable_due(self._config, Moment(step, self._clock()), self._last_durable, self.auto.steps)

    def _in_memory_due(self, step: int) -> bool:
        assert self._last is not None
        return step > self._last.step and _passed(self._config.memory_every_steps, step, self._last.step)
