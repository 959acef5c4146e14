"""What the ranks of a job agree on at the end of each step: whether a snapshot is taken, and made durable. Torch-free.

Each rank says a number, and the highest of all is what holds. Where only steps count, all ranks know by themselves at
which steps there is something to agree on; where time counts too, rank 0's clock does, and it is asked at every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.policy.adapting import AutoInterval
from phalanx.checkpoint.policy.due import KeepingUp, Moment, durable_due, passed, snapshot_due

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


class Agenda:
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
