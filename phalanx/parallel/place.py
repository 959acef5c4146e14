"""Where a rank is, and the error of a collective, which says it: rank, host, layout, group and operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.layout import Layout

_SHOWN_RANKS = 8


@dataclass(frozen=True)
class Place:
    """One rank of a run, for messages."""

    rank: int
    host: str
    layout: Layout

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (layout {self.layout})"


class CollectiveError(RuntimeError):
    """A collective failed or timed out. The cause of it is seldom here: some other rank is gone, late or elsewhere.

    Attributes:
        operation: such as ``all_gather``, or ``meeting`` where the group could not be made.
        ranks: global ranks of the group's members.
        place: the rank that tells, or None where it is not known.
    """

    def __init__(
        self, operation: str, axes: Sequence[str], ranks: Sequence[int], place: Place | None, cause: BaseException
    ) -> None:
        self.operation, self.ranks, self.place = operation, tuple(ranks), place
        who = "" if place is None else f"{place}: "
        over = "·".join(axes) or "named ranks"
        super().__init__(
            f"{who}{operation} failed in the group over {over}, ranks {shorten(ranks)}: {_first_line(cause)}\n"
            "A member of the group has ended, is later than parallel.timeout_s allows (parallel.first_timeout_s until "
            "the first step is done), or has gone on to another operation. The first error of the job is the cause: "
            "look for a rank that raised, or for the member that reports nothing."
        )


def shorten(ranks: Sequence[int]) -> str:
    """Ranks as text; of many, the first and the last, and how many they are."""
    if len(ranks) <= _SHOWN_RANKS:
        return ", ".join(map(str, ranks))
    first = ", ".join(map(str, ranks[: _SHOWN_RANKS - 2]))
    return f"{first}, …, {ranks[-1]} ({len(ranks)} in all)"


def _first_line(error: BaseException) -> str:
    """The message without the stack of C++ frames that torch puts below it."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
