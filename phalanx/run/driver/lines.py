"""How many lines of ranks people are shown: ten thousand hosts write more than anybody reads. Torch-free."""

from __future__ import annotations

from phalanx.run.now import Now

LINES_PER_S = 500
"""Of all ranks together; what is more stays in the files of the hosts. Those of the first rank's host always pass."""


class LineBudget:
    """Lets through so many lines a second, evenly over it, and no more than a second's at once."""

    def __init__(self, per_s: float = LINES_PER_S) -> None:
        self._per_s = self._left = per_s
        self._last_s = 0.0

    def take(self, count: int, rank: int, now: Now) -> bool:
        """Whether the lines of a host may pass, given its first rank."""
        self._left = min(self._left + (now.monotonic_s - self._last_s) * self._per_s, self._per_s)
        self._last_s = now.monotonic_s
        if self._left <= 0 and rank != 0:
            return False
        self._left -= count
        return True
