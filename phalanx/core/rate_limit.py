"""A rate limit: log lines at a bounded rate, whatever their source: pure but for the clock that is passed in."""

from __future__ import annotations

import time
from collections.abc import Callable

EACH_S = 10.0
_MAX_KINDS = 256


class LogThrottle:
    """Lets one line of each kind through in ten seconds, and counts the others; for one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}

    def due(self, kind: str) -> int | None:
        """How many of this kind were kept back since the last line; None: keep this one back too."""
        now_s = self._clock()
        since_s, kept_back = self._kinds.get(kind, (float("-inf"), 0))
        if now_s - since_s < EACH_S:
            self._kinds[kind] = since_s, kept_back + 1
            return None
        self._kinds[kind] = now_s, 0
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        return kept_back


def and_others(kept_back: int) -> str:
    """For the end of a line after so many like it."""
    return f" (and {kept_back} more for the same reason before)" if kept_back else ""
