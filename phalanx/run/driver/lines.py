"""How many lines of ranks people are shown: ten thousand hosts write more than anybody reads. Torch-free."""

from __future__ import annotations

from phalanx.run.logs.tails import left_out
from phalanx.run.messages import LogLine
from phalanx.run.now import Now

LINES_PER_S = 500
"""Of all ranks together; what is more stays in the files of the hosts. Those of the first rank's host always pass."""

SHOWN_WHOLE_HOSTS = 64
"""Of so few hosts all passes that they send, which `phalanx.run.logs.tails` bounds."""


class LineBudget:
    """Lets through so many lines a second, evenly over it, and no more than a second's at once; counts the others.

    Args:
        hosts: of the job.
    """

    def __init__(self, hosts: int, per_s: float = LINES_PER_S) -> None:
        self._is_small = hosts <= SHOWN_WHOLE_HOSTS
        self._per_s = self._left = per_s
        self._last_s = 0.0
        self._left_out = 0

    def take(self, count: int, rank: int, now: Now) -> bool:
        """Whether the lines of a host may pass, given its first rank."""
        if self._is_small:
            return True
        self._left = min(self._left + (now.monotonic_s - self._last_s) * self._per_s, self._per_s)
        self._last_s = now.monotonic_s
        if self._left <= 0 and rank != 0:
            self._left_out += count
            return False
        self._left -= count
        return True

    def left_out(self, rank: int) -> list[LogLine]:
        """What is said, under the name of this rank, of lines that have not passed since the last call."""
        if not self._left_out or rank == 0:
            return []
        count, self._left_out = self._left_out, 0
        return [LogLine(rank, f"{left_out(count)} of their ranks")]
