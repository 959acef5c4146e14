"""Lines of ranks and of the kernel log become findings for the driver, and what repeats is left out.

What a line says is decided by rules (`phalanx.detect.logs.log_rules`).
"""

from __future__ import annotations

from collections import OrderedDict

from phalanx.detect.logs.log_rules import Matcher, shorten
from phalanx.run.messages import Finding

KERNEL_RANK = -1  # the rank of a line of the kernel log


class Watcher:
    """Turns lines into findings, and leaves out those that the same rank repeats within `window_s`.

    Remembers the newest `capacity` findings.
    """

    def __init__(self, matcher: Matcher, window_s: float = 60.0, capacity: int = 4096) -> None:
        self._matcher = matcher
        self._window_s = window_s
        self._capacity = capacity
        self._seen_s: OrderedDict[tuple[int, str, str], float] = OrderedDict()
        self.left_out: dict[str, int] = {}
        """How many findings were left out, by the name of the rule."""

    def look(self, rank: int, line: str, now_s: float) -> Finding | None:
        """What a line says, unless that rank has just written the same.

        Args:
            rank: who wrote it; `KERNEL_RANK` for the kernel log.
            now_s: any clock that does not go back.
        """
        found = self._matcher.find_which(line, "kernel" if rank == KERNEL_RANK else "output")
        if found is None:
            return None
        rule, which = found
        key = (rank, rule.name, which)
        if now_s - self._seen_s.get(key, float("-inf")) < self._window_s:
            self.left_out[rule.name] = self.left_out.get(rule.name, 0) + 1
            return None
        self._seen_s[key] = now_s
        self._seen_s.move_to_end(key)
        if len(self._seen_s) > self._capacity:
            self._seen_s.popitem(last=False)
        return Finding(rank, rule.name, rule.fault, shorten(line), rule.severity)

    def forget(self) -> None:
        """A new attempt begins: what it repeats is new."""
        self._seen_s.clear()
