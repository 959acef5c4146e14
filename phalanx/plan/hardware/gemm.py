"""Time of matrix products on a GPU: tiles over its cores, corrected by what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from phalanx.plan.hardware.either import ARRAYS, SCALARS, Functions, LogGrid, broadcast
from phalanx.plan.types import Mark

_FEW = 4096
"""Arrays up to this size are computed for all tiles at once; longer ones tile by tile, which needs less memory."""

_UNIT = 128
"""Rows and columns of the tiles in which the correction counts waves (two of them for each core)."""


@dataclass(frozen=True)
class Tile:
    """One way to cut a product: tiles of the result, whose sums over k can be split between cores.

    Attributes:
        splits: parts of k that different cores sum up; more than one costs memory traffic to add them.
        share: of a core's peak that long tiles of this size reach.
        start_columns: what it costs to start and to end a tile, in columns of k.
    """

    rows: float
    columns: float
    splits: float
    share: float
    start_columns: float


@dataclass(frozen=True)
class Clock:
    """How the clock falls at the limit of power.

    Attributes:
        slower_ratio: by how much computing takes longer under lasting load.
        from_s: kernels up to this length, measured alone, run at full clock.
        to_s: those from this length on run as under lasting load; between them straight over the logarithm.
    """

    slower_ratio: float = 0.0
    from_s: float = 5e-4
    to_s: float = 2e-3

    def factor(self, f: Functions, seconds: Any) -> Any:
        """Over the time at full clock, for a kernel measured alone."""
        if not self.slower_ratio:
            return 1.0
        part = (f.log(seconds) - math.log(self.from_s)) / (math.log(self.to_s) - math.log(self.from_s))
        return 1 + self.slower_ratio * f.least(f.largest(part, 0.0), 1.0)


_REMEMBERED = 8192


@dataclass(frozen=True)
class TileGemm:
    """A matrix product as waves of tiles over the device's cores.

    Each core computes one tile of the result at a time; a wave is as many tiles as there are cores, and the last one is
    as long as a full one. The best of several ways to cut counts. Moving the operands takes its time beside it; what is
    longer dominates, smoothly. What remains between this and the measurements is a table over waves and k.

    Attributes:
        cores: streaming multiprocessors, or compute units.
        split_ratio: bytes of partial sums moved for each one of them, over their size.
        memory_ratio: of the memory's peak rate that operands move at.
        softness: exponent of the norm that joins computing and moving; the larger, the more only the longer one counts.
        launch_s: from start to end of a kernel, without its work.
        correction: time over the model's, over waves and k; None: not measured.
        weight_gradient_ratio: time of a weight gradient over that of a forward product of the same size.
    """

    peak_flops_per_s: float
    memory_bytes_per_s: float
    element_bytes: int
    cores: int
    tiles: tuple[Tile, ...]
    split_ratio: float
    memory_ratio: float
    softness: float
    launch_s: float
    clock: Clock
    correction: LogGrid | None
    weight_gradient_ratio: float
    mark: Mark
    source: str
    _columns: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    _cuts: tuple[tuple[float, ...], ...] = field(init=False, repr=False, compare=False)
    _known: Callable[..., float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A layer has the same product forward and backward, and layouts share most of theirs.
        object.__setattr__(self, "_known", lru_cache(maxsize=_REMEMBERED)(self._scalar))
        cuts = tuple(self._cut(tile) for tile in self.tiles)
        object.__setattr__(self, "_cuts", cuts)
        object.__setattr__(self, "_columns", tuple(np.array(column)[:, None] for column in zip(*cuts, strict=True)))

    def seconds(
        self, m: Any, n: Any, k: Any, batch: Any = 1, weight_gradient: bool = False, alone: bool = False
    ) -> Any:
        """Time of `batch` products of m x k with k x n.

        Args:
            weight_gradient: the sum over k is one over tokens, and of 32-bit numbers.
            alone: as a benchmark measures it, where short kernels run at full clock; else within lasting load.
        """
        (m, n, k, batch), shape = broadcast(m, n, k, batch)
        if shape is None:
            seconds = self._known(m, n, k, batch, alone)
        else:
            seconds = self._array(m, n, k, batch, alone).reshape(shape)
        return seconds * self.weight_gradient_ratio if weight_gradient else seconds

    def _scalar(self, m: float, n: float, k: float, batch: float, alone: bool) -> float:
        compute_s = min([_cut_s(SCALARS, cut, m, n, k, batch, self.cores) for cut in self._cuts])
        return float(self._whole(SCALARS, compute_s, m, n, k, batch, alone))

    def _array(self, m: Any, n: Any, k: Any, batch: Any, alone: bool) -> Any:
        if m.size <= _FEW:
            compute_s = _cut_s(ARRAYS, self._columns, m, n, k, batch, self.cores).min(axis=0)
        else:
            compute_s = _cut_s(ARRAYS, self._cuts[0], m, n, k, batch, self.cores)
            for cut in self._cuts[1:]:
                np.minimum(compute_s, _cut_s(ARRAYS, cut, m, n, k, batch, self.cores), out=compute_s)
        return self._whole(ARRAYS, compute_s, m, n, k, batch, alone)

    def _whole(self, f: Functions, compute_s: Any, m: Any, n: Any, k: Any, batch: Any, alone: bool) -> Any:
        moved = self.element_bytes * batch * (m * k + n * k + m * n)
        slowed_s = compute_s * (self.clock.factor(f, compute_s) if alone else 1 + self.clock.slower_ratio)
        memory_s = moved / (self.memory_bytes_per_s * self.memory_ratio)
        seconds = (slowed_s**self.softness + memory_s**self.softness) ** (1 / self.softness) + self.launch_s
        if self.correction is not None:
            seconds = seconds * self.correction.at(self.waves(f, m, n, batch), k)
        fastest_s = f.largest(2 * batch * m * n * k / self.peak_flops_per_s, moved / self.memory_bytes_per_s)
        return f.largest(seconds, fastest_s)

    def waves(self, f: Functions, m: Any, n: Any, batch: Any) -> Any:
        """Waves, in tiles of 128 x 256 as an average; the first axis of the correction."""
        return batch * f.up(m / _UNIT) * f.up(n / _UNIT) / (2 * self.cores)

    def _cut(self, tile: Tile) -> tuple[float, ...]:
        core_flops_per_s = self.peak_flops_per_s / self.cores * tile.share
        column_s = 2 * tile.rows * tile.columns / core_flops_per_s
        split_s = self.split_ratio * tile.splits * 4 / self.memory_bytes_per_s if tile.splits > 1 else 0.0
        return tile.rows, tile.columns, tile.splits, column_s, tile.start_columns, split_s


def _cut_s(f: Functions, cut: Sequence[Any], m: Any, n: Any, k: Any, batch: Any, cores: int) -> Any:
    """Time to compute, cut in one way; `cut` may be columns of arrays with a row for each way."""
    rows, columns, splits, column_s, start_columns, split_s = cut
    waves = f.up(f.up(m / rows) * f.up(n / columns) * (batch * splits) / cores)
    return waves * column_s * (k / splits + start_columns) + split_s * (batch * m * n)
