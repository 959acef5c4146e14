"""Long series of numbers: smoothing, fewer points that look the same, and arrays in Plotly's binary form."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

# In a block of the smoothing sum, weights grow by at most so much: beyond, the smallest would be rounded away.
_MOST_GROWTH = 1e6
_WEIGHS_NOTHING = 40.0
"""Logarithm of what is lost in the rounding of a sum."""


def packed(values: Any) -> dict[str, Any]:
    """An array of one or two dimensions as Plotly's JSON takes it: a quarter of the text, and read without parsing.

    Floats become 32 bits wide, but for those that would lose a whole number by it (steps, tokens); so do integers.
    """
    array = np.ascontiguousarray(values)
    if array.dtype.kind in "iub":
        fits = not array.size or (int(array.min()) >= -(2**31) and int(array.max()) < 2**31)
        array = array.astype("<i4" if fits else "<f8")
    else:
        whole = bool(np.nanmax(np.abs(array), initial=0.0) < 2**24)
        array = array.astype("<f4" if whole else "<f8")
    text = {"dtype": array.dtype.str[1:], "bdata": base64.b64encode(array.tobytes()).decode()}
    return text | {"shape": ", ".join(map(str, array.shape))} if array.ndim == 2 else text


def unpacked(values: dict[str, Any]) -> np.ndarray:
    """The array that `packed` made a value of."""
    array = np.frombuffer(base64.b64decode(values["bdata"]), "<" + values["dtype"])
    return array.reshape([int(size) for size in values["shape"].split(",")]) if "shape" in values else array


def smoothed(values: np.ndarray, span: float) -> np.ndarray:
    """Exponential moving average, as pandas' ``ewm(span=span).mean()``: a value weighs 1 - 2 / (span + 1) of the next.

    Args:
        values: (n,); NaN weighs nothing, and stays NaN.
        span: in values; up to 1: nothing is smoothed.
    """
    if span <= 1 or not len(values):
        return values.astype(float, copy=False)
    decay = 1 - 2 / (span + 1)
    is_there = np.isfinite(values)
    if is_there.all():
        sums = _decayed_sum(values, decay)
        sums *= 1 - decay
        first = min(len(values), int(_WEIGHS_NOTHING / -math.log(decay)) + 1)
        sums[:first] /= 1 - decay ** np.arange(1, first + 1)
        return sums
    numerator = _decayed_sum(np.where(is_there, values, 0.0), decay)
    weight = _decayed_sum(is_there.astype(float), decay)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(is_there, numerator / weight, np.nan)


def _decayed_sum(values: np.ndarray, decay: float) -> np.ndarray:
    """``sum[t] = decay * sum[t - 1] + values[t]``, block by block."""
    size = max(1, min(len(values), int(math.log(_MOST_GROWTH) / -math.log(decay))))
    blocks = -(-len(values) // size)
    powers = decay ** np.arange(size)
    rows = np.zeros((blocks, size))
    rows.reshape(-1)[: len(values)] = values
    rows /= powers
    np.cumsum(rows, axis=1, out=rows)
    rows *= powers
    carried, carries = 0.0, np.zeros(blocks)
    for number, last in enumerate(rows[:, -1].tolist()):
        carries[number] = carried
        carried = last + decay**size * carried
    rows += carries[:, None] * (decay * powers)
    return rows.reshape(-1)[: len(values)]


def fewer(values: np.ndarray, points: int) -> np.ndarray:
    """Places of at most about `points` values that draw the same curve: the least and the most of each bucket.

    The first and the last are there. Where a whole bucket has no finite number, the curve breaks.

    Args:
        values: (n,).

    Returns:
        (at most points + 2,) places, ascending.
    """
    if len(values) <= points:
        return np.arange(len(values))
    buckets = max(1, points // 2)
    size = -(-len(values) // buckets)
    buckets = -(-len(values) // size)
    rows = np.full((buckets, size), values[-1])
    rows.reshape(-1)[: len(values)] = values
    starts = np.arange(buckets) * size
    is_there = np.isfinite(rows)
    low, high = (rows, rows) if is_there.all() else (np.where(is_there, rows, fill) for fill in (np.inf, -np.inf))
    places = np.concatenate([starts + low.argmin(axis=1), starts + high.argmax(axis=1), [0, len(values) - 1]])
    return np.unique(np.minimum(places, len(values) - 1))
