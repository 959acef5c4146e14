"""How fast a snapshot is examined: no faster than needed, so that training keeps its cores. Torch-free."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

_FIRST_BYTES_PER_S = 4e9  # until it has been measured
_FORGET = 0.2
_MAX_PAUSE_S = 0.1
_LONGEST_S = 1.0
_FIRST_INTERVAL_S = 1.0


def budget_s(interval_s: float | None, persist_s: float = 0.0) -> float:
    """Within how many seconds a snapshot is examined.

    Args:
        interval_s: how long after the one before it comes; None: it is the first.
        persist_s: how long it will then take to be durable, if it is to be: with that, too, it is to be done within
            half of the interval. Else leisure would make the interval longer, and a longer interval leisure.
    """
    return max(min((_FIRST_INTERVAL_S if interval_s is None else interval_s) / 2 - persist_s, _LONGEST_S), 0.0)


@dataclass
class Rhythm:
    """When a rank took its last snapshot and how long the last one took to be durable, to know how long the next may be
    examined."""

    _last_s: float | None = None
    _persist_s: float = 0.0

    def beat(self, now_s: float, *, persist: bool) -> float:
        """A snapshot is taken: within how many seconds it is examined.

        Args:
            now_s: by a clock that never goes back.
            persist: whether it is to become durable.
        """
        interval_s = None if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        return budget_s(interval_s, self._persist_s if persist else 0.0)

    def persisted(self, seconds: float) -> None:
        """One became durable, or will not, so long after it was examined."""
        self._persist_s = seconds


class Pace:
    """Spreads the work of some threads over the time there is for it.

    Args:
        threads: how many share it.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._bytes_per_s = _FIRST_BYTES_PER_S

    def expect(self, length: int) -> None:
        """So many bytes more are to be looked at."""
        with self._lock:
            self._pending_bytes += length

    def pause_s(self, length: int, took_s: float, until_s: float) -> float:
        """How long to rest after `length` bytes that took `took_s`, to be done with all at `until_s` (monotonic)."""
        with self._lock:
            self._pending_bytes -= length
            if took_s > 0 and length:
                self._bytes_per_s += _FORGET * (length / took_s - self._bytes_per_s)
            needed_s = max(self._pending_bytes, 0) / self._bytes_per_s / self._threads
        left_s = until_s - time.monotonic()
        if needed_s <= 0 or left_s <= needed_s:
            return 0.0
        return min(took_s * (left_s / needed_s - 1), left_s - needed_s, _MAX_PAUSE_S)
