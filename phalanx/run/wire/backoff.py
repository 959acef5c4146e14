"""How long to wait before the next try. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Backoff(NamedTuple):
    """Doubling waits with full jitter, so that thousands of executors do not come back at one moment.

    Attributes:
        first_s: the longest wait before the first new try.
        longest_s: the longest wait of all.
    """

    first_s: float = 0.2
    longest_s: float = 10.0

    def delay_s(self, tries: int, fraction: float) -> float:
        """The wait after so many tries in vain (from 0), with a random `fraction` from 0 to 1 of the longest."""
        return fraction * min(self.longest_s, self.first_s * 2.0 ** min(tries, 60))
