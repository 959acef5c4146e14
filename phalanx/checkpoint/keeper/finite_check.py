"""Looking at the numbers in a slot: whether all are finite, and whether any trained one has changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.checkpoint.format.shard_plan import ALIGN_BYTES, Piece, ShardPlan

BLOCK_BYTES = 512 << 10
"""What is looked at in one go: it fits into the cache of a core."""

# How each dtype is looked at: numbers that numpy knows; or bits, of which all those of the exponent are set in what is
# not finite (numpy has no bfloat16, and is slow with float16). Other dtypes are not looked at.
_NUMBERS = {"float32": np.float32, "float64": np.float64}
_EXPONENTS = {"bfloat16": np.uint16(0x7F80), "float16": np.uint16(0x7C00)}
_LOOKED_AT = frozenset({*_NUMBERS, *_EXPONENTS})

MOST_NAMES = 8
"""Of pieces that are not finite."""


@dataclass
class NumberRun:
    """Pieces of one dtype, one behind the other, that are looked at together with the gaps between them."""

    start: int
    stop: int
    dtype: str
    pieces: list[Piece]


class FiniteCheck:
    """Looks for numbers that are not finite in one copy of a shard, block by block, in order.

    What lies in the gaps between pieces is not of the shard; where a block holds something that is not finite, its
    pieces are looked at one by one.

    Attributes:
        sick: names of pieces with such numbers, so far; some of them.
    """

    def __init__(self, plan: ShardPlan, memory: memoryview) -> None:
        self._runs = runs_of(plan)
        self._memory = memory
        self._next = 0
        self._flags = np.empty(BLOCK_BYTES // 4, np.bool_)
        self._bits = np.empty(BLOCK_BYTES // 2, np.uint16)
        self.sick: list[str] = []

    def look(self, start: int, stop: int) -> None:
        """Look at the bytes from `start` to `stop`, at most `BLOCK_BYTES`, which follow those of the last call."""
        while self._next < len(self._runs) and self._runs[self._next].stop <= start:
            self._next += 1
        for number in range(self._next, len(self._runs)):
            run = self._runs[number]
            if run.start >= stop or len(self.sick) >= MOST_NAMES:
                break
            if not self._is_finite(run.dtype, max(start, run.start), min(stop, run.stop)):
                self._find(run, start, stop)

    def _find(self, run: NumberRun, start: int, stop: int) -> None:
        for piece in run.pieces:
            first, last = max(start, piece.start_bytes), min(stop, piece.start_bytes + piece.length_bytes)
            if first < last and piece.name not in self.sick and not self._is_finite(run.dtype, first, last):
                self.sick.append(piece.name)
            if len(self.sick) >= MOST_NAMES:
                break

    def _is_finite(self, dtype: str, start: int, stop: int) -> bool:
        mask = _EXPONENTS.get(dtype)
        if mask is None:
            numbers = self._view(_NUMBERS[dtype], start, stop)
            return bool(np.isfinite(numbers, out=self._flags[: len(numbers)]).all())
        bits = self._view(np.uint16, start, stop)
        return bool(np.bitwise_and(bits, mask, out=self._bits[: len(bits)]).max() != mask)

    def _view(self, dtype: Any, start: int, stop: int) -> NDArray[Any]:
        return np.frombuffer(self._memory, dtype, (stop - start) // np.dtype(dtype).itemsize, start)


def runs_of(plan: ShardPlan) -> list[NumberRun]:
    """The parts of a slot that are looked at, in order."""
    runs: list[NumberRun] = []
    for piece in sorted(plan.pieces, key=lambda piece: piece.start_bytes):
        if piece.role == "other" or not piece.length_bytes or piece.dtype not in _LOOKED_AT:
            continue
        stop = piece.start_bytes + piece.length_bytes
        last = runs[-1] if runs else None
        if last is not None and last.dtype == piece.dtype and 0 <= piece.start_bytes - last.stop < ALIGN_BYTES:
            last.pieces.append(piece)
            last.stop = stop
        else:
            runs.append(NumberRun(piece.start_bytes, stop, piece.dtype, [piece]))
    return runs


def has_changed(plan: ShardPlan, memory: memoryview, previous: memoryview) -> bool | None:
    """Whether any trained piece differs from an earlier copy of the same plan; None if nothing of it is trained.

    Ends at the first difference, so that it costs next to nothing where training goes on; and it is exact, whatever
    else shares a chunk with what is trained.
    """
    trained = [piece for piece in plan.pieces if piece.role == "trained" and piece.length_bytes]
    if not trained:
        return None
    for piece in trained:
        end = piece.start_bytes + piece.length_bytes
        for start in range(piece.start_bytes, end, BLOCK_BYTES):
            count = min(BLOCK_BYTES, end - start)
            new, old = (np.frombuffer(side, np.uint8, count, start) for side in (memory, previous))
            if not np.array_equal(new, old):
                return True
    return False


@dataclass(frozen=True)
class Findings:
    """What examining a copy has shown; see `phalanx.checkpoint.format.shard_plan.Record`."""

    sums: tuple[int, ...]
    sick: tuple[str, ...]
    changed: bool | None
