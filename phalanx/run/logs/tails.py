"""The newest lines of ranks, for heartbeats and for reports; bounded, and what is left out is counted. Torch-free."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from phalanx.run.logs.lines import cut
from phalanx.run.messages import LogLine


class Tails:
    """The newest lines of each rank.

    Args:
        heartbeat_lines: of each rank that one heartbeat carries at most.
        heartbeat_chars: of each such line at most.
        kept_lines: of each rank that are kept for reports.
    """

    def __init__(self, *, heartbeat_lines: int = 4, heartbeat_chars: int = 256, kept_lines: int = 50) -> None:
        self._heartbeat_lines, self._heartbeat_chars, self._kept_lines = heartbeat_lines, heartbeat_chars, kept_lines
        self._new: dict[int, deque[str]] = {}
        self._kept: dict[int, deque[str]] = {}
        self._dropped: Counter[int] = Counter()

    def add(self, rank: int, lines: Sequence[str]) -> None:
        """Lines that a rank has written."""
        new = self._new.setdefault(rank, deque(maxlen=self._heartbeat_lines))
        self._dropped[rank] += max(len(new) + len(lines) - self._heartbeat_lines, 0)
        new.extend(lines[-self._heartbeat_lines :])
        self._kept.setdefault(rank, deque(maxlen=self._kept_lines)).extend(lines[-self._kept_lines :])

    def take(self) -> list[LogLine]:
        """The newest lines since the last call, in the order of ranks; where some of a rank's were left out, a line
        says so before the others.
        """
        lines = [line for rank in sorted(self._new) for line in self._newest(rank)]
        self._new.clear()
        self._dropped.clear()
        return lines

    def _newest(self, rank: int) -> list[LogLine]:
        dropped = self._dropped[rank]
        words = "one more line is" if dropped == 1 else f"{dropped:,} more lines are"
        missing = [LogLine(rank, f"… {words} in the log")] if dropped else []
        return missing + [LogLine(rank, cut(text, self._heartbeat_chars)) for text in self._new[rank]]

    def last(self, rank: int) -> list[str]:
        """The newest lines of a rank, whole."""
        return list(self._kept.get(rank, ()))

    def clear(self) -> None:
        """Forget all, as when an attempt begins."""
        self._new.clear()
        self._kept.clear()
        self._dropped.clear()
