"""Which positions of a sequence each context rank holds, and which of its keys another rank needs.

A causal sequence cut into runs gives the last rank most of the work. So where layers see all of the past, a sequence is
cut into 2 C pieces and rank r of C holds pieces r and 2 C - 1 - r: every rank then sees equally many keys ("zig-zag").
Where all layers have windows, the work is equal anyway, and runs have fewer neighbours. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import UserError


@dataclass(frozen=True)
class Piece:
    """Positions ``[start, stop)`` of a sequence."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Positions."""
        return self.stop - self.start

    def sees(self, keys: Piece, window: int | None) -> bool:
        """Whether any query of this piece may see any of `keys`: not later, and not before its window."""
        if keys.start >= self.stop:
            return False
        return window is None or keys.stop - 1 > self.start - window

    def sees_all(self, keys: Piece, window: int | None) -> bool:
        """Whether every query of this piece sees every one of `keys` (documents aside)."""
        return keys.stop <= self.start + 1 and (window is None or self.stop - 1 - keys.start < window)


@dataclass(frozen=True)
class SequenceSplit:
    """How a sequence is shared by the ranks of a context group.

    Args:
        length: positions of the whole sequence.
        size: ranks.
        balanced: zig-zag instead of runs.

    Raises:
        UserError: the sequence cannot be cut into equal pieces.
    """

    length: int
    size: int
    balanced: bool

    def __post_init__(self) -> None:
        count = self.size * self.pieces_per_rank
        if self.length % count:
            raise UserError(
                f"a sequence of {self.length} tokens cannot be cut into {count} equal pieces",
                cure=f"make data.sequence_length a multiple of {count}",
                field="parallel.context",
                value=self.size,
            )

    @property
    def pieces_per_rank(self) -> int:
        """2 where balanced, else 1."""
        return 2 if self.balanced and self.size > 1 else 1

    @property
    def local_length(self) -> int:
        """Positions on each rank."""
        return self.length // self.size

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` holds, in the order in which it holds it."""
        count = self.size * self.pieces_per_rank
        size = self.length // count
        numbers = (rank, count - 1 - rank) if self.pieces_per_rank == 2 else (rank,)
        return tuple(Piece(n * size, (n + 1) * size) for n in numbers)

    def needed(self, reader: int, owner: int, window: int | None) -> tuple[int, ...]:
        """Which pieces of `owner` (by their place in `pieces`) some query of `reader` sees."""
        return tuple(
            place
            for place, keys in enumerate(self.pieces(owner))
            if any(queries.sees(keys, window) for queries in self.pieces(reader))
        )
