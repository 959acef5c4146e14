"""When a snapshot is due, when it becomes a durable checkpoint, and how all ranks agree on both.

Something stays due until it was taken: `last` is the moment of the one that *was* taken, so a snapshot for which there
was no free slot at its step is taken a step or two later, and the one after it is due where it would have been. Where
storage cannot keep up, one is therefore taken whenever the one before it is durable: as evenly as storage goes.

To agree at the end of a step, each rank says a number, and the highest of all is what holds. Where only steps count,
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
        auto_steps: the interval that `phalanx.checkpoint.interval` chose; 0: none yet. Counts with `auto` only.
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


FREE = 0  # a snapshot can be taken and made durable
MEMORY_ONLY = 1  # it cannot be made durable: that is not due (says rank 0's clock), or one is on its way
BUSY = 2  # it cannot be taken
RENEWED = 3  # and a keeper is new: the others have to hear where it is


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


class SnapshotAgenda:
    """When what is due.

    Args:
        config: of checkpoints.
        auto: the interval of ``auto``; only rank 0's counts.
        decides: whether this is rank 0.
        clock: seconds.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        auto: AutoInterval,
        *,
        decides: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self.auto, self._decides, self._clock = config, auto, decides, clock
        self._by_clock = config.every_s > 0 or config.auto
        self._last: Moment | None = None
        self._last_durable = Moment(0, 0.0)
        self.skipped = 0
        self.keeping_up = KeepingUp(config)

    def recall(self, costs: dict[str, Any] | None, hosts: int, *, failed: bool) -> None:
        """Take up what an earlier attempt measured (`AutoInterval.to_json`).

        Args:
            hosts: of the job.
            failed: whether that attempt ended by a failure.
        """
        self.auto = AutoInterval(self._config, hosts, costs, failed=failed)

    def begin(self, step: int) -> None:
        """Training stands at `step`, if that was not known yet."""
        if self._last is None:
            self._last = self._last_durable = Moment(step, self._clock())

    def asks(self, step: int) -> bool:
        """Whether the ranks have to agree at the end of `step`; the same on all."""
        return self._by_clock or self._wants(step)

    def waits(self, step: int) -> bool:
        """Whether training stands still at the end of `step` until this rank is free for what is due there."""
        return self._config.wait and self._wants_durable(step)

    def says(self, step: int, state: int) -> int:
        """What this rank says there, where its keeper is in `state` (`FREE` …)."""
        deciding = self._by_clock and self._decides
        return max(state, MEMORY_ONLY) if deciding and not self._wants_durable(step) else state

    def decide(self, step: int, agreed: int) -> Decision:
        """What follows from the highest number that was said."""
        wanted = self._wants(step) if self._decides or not self._by_clock else self._wants_in_memory(step)
        persist = agreed == FREE and (self._by_clock or self._wants_durable(step))
        take = persist or (agreed <= MEMORY_ONLY and self._wants_in_memory(step))
        late = self._wants_durable(step) if self._decides or not self._by_clock else False
        return Decision(take, persist, (wanted and not take) or (late and not persist))

    def took(self, step: int, *, persist: bool) -> None:
        """A snapshot of `step` was taken."""
        now = Moment(step, self._clock())
        if persist:
            self.skipped += max(_points(self._config.every_steps, self._last_durable.step, step) - 1, 0)
            self._last_durable = now
            self.keeping_up.took(now)
        self._last = now

    def durable(self, stall_s: float, persist_s: float) -> None:
        """A checkpoint that made training stand still for `stall_s` has become durable `persist_s` after its copy."""
        self.auto.note_stall(stall_s)
        self.auto.note_durable(persist_s)
        self.keeping_up.durable(persist_s)

    def _wants(self, step: int) -> bool:
        now = Moment(step, self._clock())
        assert self._last is not None
        return snapshot_due(self._config, now, self._last, self._last_durable, self.auto.steps)

    def _wants_durable(self, step: int) -> bool:
        return durable_due(self._config, Moment(step, self._clock()), self._last_durable, self.auto.steps)

    def _wants_in_memory(self, step: int) -> bool:
        assert self._last is not None
        if step <= self._last.step:
            return False
        return passed(self._config.memory_every_steps, step, self._last.step)


def _points(every: int, last_step: int, step: int) -> int:
    """Multiples of `every` in ``(last_step, step]``."""
    return step // every - last_step // every if every else 0
