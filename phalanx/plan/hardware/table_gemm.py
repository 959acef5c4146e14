"""Time of matrix products on a device where they were measured size by size."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.types import Mark

_Logs = list[list[list[float]]]


@dataclass(frozen=True)
class TableGemm:
    """Rates of products and of weight gradients over tokens, rows and columns; between them straight in logarithms.

    A product is (tokens, columns) x (columns, rows), a weight gradient (rows, tokens) x (tokens, columns). Beyond the
    measured sizes the rate stays what it was at the last one.

    Attributes:
        tokens, widths: measured sizes; rows and columns are both out of `widths`.
        products: flops per second, a row of columns for each of tokens and of rows.
        weight_gradients: likewise.
    """

    tokens: Sequence[float]
    widths: Sequence[float]
    products: Sequence[Sequence[float]]
    weight_gradients: Sequence[Sequence[float]]
    mark: Mark
    source: str
    _log_products: _Logs = field(init=False, repr=False, compare=False)
    _log_gradients: _Logs = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_log_products", self._logarithms(self.products))
        object.__setattr__(self, "_log_gradients", self._logarithms(self.weight_gradients))

    def seconds(self, m: Any, n: Any, k: Any, batch: Any = 1, weight_gradient: bool = False) -> Any:
        """Time of `batch` products of m x k with k x n, numbers or arrays; in a weight gradient k counts tokens."""
        sizes = (k, m, n) if weight_gradient else (m, n, k)
        table = self._log_gradients if weight_gradient else self._log_products
        axes = (self.tokens, self.widths, self.widths)
        if any(isinstance(size, np.ndarray) for size in sizes):
            places = [_places(axis, np.asarray(size, dtype=float)) for axis, size in zip(axes, sizes, strict=True)]
            return 2.0 * m * n * k * batch / np.exp(_between_arrays(np.array(table), places))
        place = [_place(axis, size) for axis, size in zip(axes, sizes, strict=True)]
        return 2.0 * m * n * k * batch / math.exp(_between(table, place))

    def _logarithms(self, rows: Sequence[Sequence[float]]) -> _Logs:
        logs = [[math.log(rate) for rate in row] for row in rows]
        width = len(self.widths)
        return [logs[start : start + width] for start in range(0, len(logs), width)]


def _place(sizes: Sequence[float], size: float) -> tuple[int, int, float]:
    """The measured sizes around `size`, by number, and how far it is from the first to the second, 0 to 1."""
    after = bisect_right(sizes, size)
    if after == 0 or after == len(sizes):
        last = max(after - 1, 0)
        return last, last, 0.0
    low, high = sizes[after - 1], sizes[after]
    return after - 1, after, math.log(size / low) / math.log(high / low)


def _between(table: _Logs, place: Sequence[tuple[int, int, float]]) -> float:
    """The value in the box whose corners `place` names."""
    (t0, t1, t), (r0, r1, r), (c0, c1, c) = place

    def along(rows: list[float]) -> float:
        return rows[c0] + (rows[c1] - rows[c0]) * c

    def across(plane: list[list[float]]) -> float:
        first = along(plane[r0])
        return first + (along(plane[r1]) - first) * r

    first = across(table[t0])
    return first + (across(table[t1]) - first) * t


_Places = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


def _places(sizes: Sequence[float], size: NDArray[np.float64]) -> _Places:
    """As `_place`, for many."""
    logs, log_size = np.log(sizes), np.log(np.maximum(size, 1e-9))
    after = np.searchsorted(logs, log_size, side="right")
    low, high = np.maximum(after - 1, 0), np.minimum(after, len(logs) - 1)
    low = np.minimum(low, high)
    width = np.where(high > low, logs[high] - logs[low], 1.0)
    return low, high, np.where((after > 0) & (high > low), (log_size - logs[low]) / width, 0.0)


def _between_arrays(table: NDArray[np.float64], places: Sequence[_Places]) -> NDArray[np.float64]:
    """As `_between`, for many: the eight corners, weighted."""
    total = np.zeros(())
    for corner in range(8):
        chosen = [place[corner >> axis & 1] for axis, place in enumerate(places)]
        weights = [place[2] if corner >> axis & 1 else 1.0 - place[2] for axis, place in enumerate(places)]
        total = total + weights[0] * weights[1] * weights[2] * table[chosen[0], chosen[1], chosen[2]]
    return total
