"""Since when a series of ratios is higher: the last lasting change, by binary segmentation.

A change is where the means before and after differ most for the noise of the series (the maximum of the likelihood
ratio of one change of a normal mean); each side is looked at again, until no change is certain. Levels may fall as well
as rise, and a few steps may be one, unlike in `phalanx.detect.drift.change_points`, which finds the growth of a run.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

_TO_SD = 1.4826  # from a median absolute deviation to a standard deviation, for a normal distribution
LEAST_NOISE = 0.002
"""Ratios of steps may agree more closely for a while than in the long run."""

LEAST_SIDE = 4
"""So many values are a level, at least."""

_SPREADS = 5.0  # by which means on both sides have to differ, for all places that were looked at


class Level(NamedTuple):
    """Where a series stands at its end.

    Attributes:
        first: place in the series from which on it does.
        mean: median of the values from there on.
        before: the same of what was before; NaN: it was so from the beginning.
        values: how many there are from `first` on.
        noise: standard deviation of one value by chance.
    """

    first: int
    mean: float
    before: float
    values: int
    noise: float

    @property
    def strength(self) -> float:
        """How many standard deviations of its mean the level is above 0."""
        return self.mean / (self.noise / math.sqrt(max(self.values, 1)))


def noise_of_series(values: Values) -> float:
    """Standard deviation by chance, from differences of neighbours, which changes of the level do not widen."""
    changes = np.abs(np.diff(values[~np.isnan(values)]))
    if not len(changes):
        return LEAST_NOISE
    return max(_TO_SD * float(np.median(changes)) / math.sqrt(2), LEAST_NOISE)


def last_level(values: Values, least_change: float) -> Level:
    """The level at the end of a series; values that are NaN are left out.

    Args:
        least_change: smaller changes of the mean are none.
    """
    known = np.flatnonzero(~np.isnan(values))
    series = values[known]
    if not len(series):
        return Level(0, math.nan, math.nan, 0, LEAST_NOISE)
    noise = noise_of_series(series)
    cuts = sorted(_changes(series, 0, len(series), noise, least_change))
    first = cuts[-1] if cuts else 0
    before = series[cuts[-2] if len(cuts) > 1 else 0 : first]
    mean = float(np.median(series[first:]))
    return Level(
        int(known[first]), mean, float(np.median(before)) if len(before) else math.nan, len(series) - first, noise
    )


def begins_above(values: Values, least_change: float, above: float) -> tuple[int, float] | None:
    """Since when all levels up to the end of a series are above a value, however they differ from each other.

    Returns:
        the place in the series, and the median of what was before (NaN: nothing); None: its last level is not above.
    """
    known = np.flatnonzero(~np.isnan(values))
    series = values[known]
    if not len(series):
        return None
    cuts = [0, *sorted(_changes(series, 0, len(series), noise_of_series(series), least_change)), len(series)]
    first = len(series)
    for low, high in zip(cuts[-2::-1], cuts[:0:-1], strict=True):
        if float(np.median(series[low:high])) <= above:
            break
        first = low
    if first == len(series):
        return None
    return int(known[first]), float(np.median(series[:first])) if first else math.nan


def _changes(series: Values, low: int, high: int, noise: float, least_change: float) -> list[int]:
    count = high - low
    if count < 2 * LEAST_SIDE:
        return []
    part = series[low:high]
    sums = np.cumsum(part)
    at = np.arange(LEAST_SIDE, count - LEAST_SIDE + 1)
    before = sums[at - 1] / at
    after = (sums[-1] - sums[at - 1]) / (count - at)
    scores = np.abs(after - before) * np.sqrt(at * (count - at) / count) / noise
    best = int(np.argmax(scores))
    cut = int(at[best])
    # by medians, which a few stalls do not move
    change = abs(float(np.median(part[cut:]) - np.median(part[:cut])))
    if scores[best] < _SPREADS or change < least_change:
        return []
    left = _changes(series, low, low + cut, noise, least_change)
    return [*left, low + cut, *_changes(series, low + cut, high, noise, least_change)]
