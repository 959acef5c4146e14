"""How long steps take where nothing is written beside them, for the interval of ``auto``. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.checkpoint.policy.adapting import AutoInterval


@dataclass
class StepPace:
    """Measures from the beginning of one step to that of the next."""

    clock: Callable[[], float] = time.monotonic
    _last: tuple[int, float] | None = field(default=None)
    _was_plain: bool = True

    def began(self, step: int, auto: AutoInterval, *, is_plain: bool) -> None:
        """A step begins; the one before counts if nothing was under way at either end of it.

        Args:
            step: its number.
            auto: is told.
            is_plain: whether no snapshot is under way.
        """
        now_s = self.clock()
        if self._last is not None and self._last[0] == step - 1 and is_plain and self._was_plain:
            auto.note_step(now_s - self._last[1])
        self._last, self._was_plain = (step, now_s), is_plain
