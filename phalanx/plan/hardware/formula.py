"""Formulas over plain numbers and over arrays: the few functions they need, curves, and distinct rows.

A formula written with `functions(x, y)` takes both: NumPy costs about a microsecond for each operation on a plain
number, and one prediction asks for hundreds of them; a search asks for a few, on arrays of hundreds of thousands. Where
many layouts share a row of numbers, `distinct` finds the rows, so that each is computed once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Functions:
    """Functions for one kind of argument."""

    largest: Callable[..., Any]
    least: Callable[..., Any]
    up: Callable[[Any], Any]
    log: Callable[[Any], Any]
    exp: Callable[[Any], Any]
    where: Callable[[Any, Any, Any], Any]


def _array_largest(*values: Any) -> Any:
    found = values[0]
    for value in values[1:]:
        found = np.maximum(found, value)
    return found


def _array_least(*values: Any) -> Any:
    found = values[0]
    for value in values[1:]:
        found = np.minimum(found, value)
    return found


def _scalar_where(condition: bool, yes: Any, no: Any) -> Any:
    return yes if condition else no


SCALARS = Functions(max, min, math.ceil, math.log, math.exp, _scalar_where)
ARRAYS = Functions(_array_largest, _array_least, np.ceil, np.log, np.exp, np.where)


def functions(*values: object) -> Functions:
    """Functions for arrays where any of `values` is one, else for plain numbers."""
    return ARRAYS if any_array(values) else SCALARS


def any_array(values: Iterable[object]) -> bool:
    """Whether one of `values` is an array."""
    return np.ndarray in map(type, values)  # a third of the time of as many calls of isinstance


def where(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where `condition`, else `no`."""
    return functions(condition, yes, no).where(condition, yes, no)


def largest(*values: Any) -> Any:
    """The largest of several values."""
    return functions(*values).largest(*values)


def least(*values: Any) -> Any:
    """The smallest of several values."""
    return functions(*values).least(*values)


_LEAST = 1e-300
"""Nothing has no logarithm; a curve is flat long before."""


@dataclass(frozen=True)
class LogCurve:
    """A curve through points, straight between them where both axes are logarithmic.

    Below the first point it keeps the first value; above the last one it keeps the last slope where `grows`, else the
    last value.
    """

    xs: Sequence[float]
    ys: Sequence[float]
    grows: bool = False
    _log_xs: list[float] = field(init=False, repr=False, compare=False)
    _log_ys: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        log_xs, log_ys = [math.log(x) for x in self.xs], [math.log(y) for y in self.ys]
        if self.grows:  # far enough that nothing lies beyond
            slope = (log_ys[-1] - log_ys[-2]) / (log_xs[-1] - log_xs[-2])
            log_xs.append(log_xs[-1] + 40)
            log_ys.append(log_ys[-1] + 40 * slope)
        object.__setattr__(self, "_log_xs", log_xs)
        object.__setattr__(self, "_log_ys", log_ys)

    def at(self, x: Any) -> Any:
        """The value at `x`, a number or an array."""
        if isinstance(x, np.ndarray):
            return np.exp(np.interp(np.log(np.maximum(x, _LEAST)), self._log_xs, self._log_ys))
        return math.exp(self._at_log(math.log(x)))

    def _at_log(self, log_x: float) -> float:
        after = bisect_right(self._log_xs, log_x)
        if after == 0:
            return self._log_ys[0]
        if after == len(self._log_xs):
            return self._log_ys[-1]
        left, right = self._log_xs[after - 1], self._log_xs[after]
        low, high = self._log_ys[after - 1], self._log_ys[after]
        return low + (high - low) * (log_x - left) / (right - left)


@dataclass(frozen=True)
class LogGrid:
    """Factors over two axes, straight between points where the axes and the factors are logarithmic; flat outside."""

    xs: Sequence[float]
    ys: Sequence[float]
    factors: Sequence[Sequence[float]]
    _log_xs: list[float] = field(init=False, repr=False, compare=False)
    _log_ys: list[float] = field(init=False, repr=False, compare=False)
    _logs: list[list[float]] = field(init=False, repr=False, compare=False)
    _array: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        logs = [[math.log(factor) for factor in row] for row in self.factors]
        object.__setattr__(self, "_log_xs", [math.log(x) for x in self.xs])
        object.__setattr__(self, "_log_ys", [math.log(y) for y in self.ys])
        object.__setattr__(self, "_logs", logs)
        object.__setattr__(self, "_array", np.array(logs))

    def at(self, x: Any, y: Any) -> Any:
        """The factor at `x` and `y`: two numbers, or arrays of one shape."""
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
            return self._at_arrays(np.asarray(x), np.asarray(y))
        row, down = _place(self._log_xs, math.log(x))
        column, right = _place(self._log_ys, math.log(y))
        above, below = self._logs[row], self._logs[row + 1]
        upper = above[column] + (above[column + 1] - above[column]) * right
        lower = below[column] + (below[column + 1] - below[column]) * right
        return math.exp(upper + (lower - upper) * down)

    def _at_arrays(self, x: Any, y: Any) -> Any:
        row, down = _places(self._log_xs, np.log(x))
        column, right = _places(self._log_ys, np.log(y))
        width = len(self._log_ys)
        start = row * width + column
        flat = self._array.ravel()
        upper = flat[start] + (flat[start + 1] - flat[start]) * right
        lower = flat[start + width] + (flat[start + width + 1] - flat[start + width]) * right
        return np.exp(upper + (lower - upper) * down)


def _place(points: list[float], value: float) -> tuple[int, float]:
    """The interval of `points` that `value` is in, and how far along, from 0 to 1."""
    if value <= points[0]:
        return 0, 0.0
    if value >= points[-1]:
        return len(points) - 2, 1.0
    left = bisect_right(points, value) - 1
    return left, (value - points[left]) / (points[left + 1] - points[left])


def _places(points: list[float], values: Any) -> tuple[Any, Any]:
    clipped = np.clip(values, points[0], points[-1])
    left = np.minimum(np.searchsorted(points, clipped, side="right") - 1, len(points) - 2)
    at = np.asarray(points)
    return left, (clipped - at[left]) / (at[left + 1] - at[left])


def broadcast(*values: Any) -> tuple[tuple[Any, ...], tuple[int, ...] | None]:
    """Flat float arrays of one length with the shape that they had together; plain floats and None where all are."""
    if not any_array(values):
        return tuple(map(float, values)), None
    arrays = np.broadcast_arrays(*values)
    return tuple(np.asarray(array, dtype=np.float64).ravel() for array in arrays), arrays[0].shape


_ROOM = 2**62


def distinct(*columns: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The different rows of columns of whole numbers from 0 on.

    Ten times as fast as ``numpy.unique(..., axis=0)``, which compares rows byte by byte.

    Returns:
        where each different row is first; and for every row, which of these it is.
    """
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        base = int(column.max(initial=0)) + 1
        if (int(codes.max(initial=0)) + 1) * base > _ROOM:
            codes = np.unique(codes, return_inverse=True)[1]
        codes = codes * base + column
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    return first, which
