"""An executor that nobody wants any more: no driver comes, and nothing of the job runs on its host. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable


class Alone:
    """For how long an executor has had neither a driver nor workers.

    Args:
        limit_s: how long it waits for a driver.
        clock: seconds, monotonic.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._since_s = clock()

    def is_over(self, *, has_driver: bool, has_workers: bool) -> bool:
        """Whether it has waited long enough; to be asked now and then."""
        now_s = self._clock()
        if has_driver or has_workers:
            self._since_s = now_s
        return now_s - self._since_s >= self._limit_s
