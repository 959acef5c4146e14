"""Samples that a file holds twice: rows that were written again, or two servers that scrape the same hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.monitoring.metric_names import RawSeries

_LOOKED_AT = 200
"""Series that the period is taken from."""

_REGULAR = 2.0
"""Between the distances of most samples of a series that is regular: the ninth decile over the first."""


def distinct_samples(raw: Sequence[RawSeries]) -> tuple[list[RawSeries], float]:
    """Series with each moment once, the later value of several, and the period of most.

    Samples at less than a second from each other that come at odd distances are those of several collectors: of each
    second the first is kept, and the period is that of seconds.
    """
    once = [_once(one) for one in raw]
    period_s, is_regular = _period_s([one.times_s for one in once])
    if period_s < 1 and not is_regular:
        once = [_of_seconds(one) for one in once]
        period_s, _ = _period_s([one.times_s for one in once])
    return once, max(1e-3, round(period_s, 3))


def _once(one: RawSeries) -> RawSeries:
    if (np.diff(one.times_s) > 0).all():
        return one
    one = _known(one)
    is_last = np.append(np.diff(one.times_s) > 0, True)
    return replace(one, times_s=one.times_s[is_last], values=one.values[is_last])


def _known(one: RawSeries) -> RawSeries:
    """Without rows that hold another metric of the same moment, unless there are no others."""
    known = ~np.isnan(one.values)
    return replace(one, times_s=one.times_s[known], values=one.values[known]) if known.any() else one


def _of_seconds(one: RawSeries) -> RawSeries:
    # Counted from the series' first sample, so that a second never begins between both collectors.
    one = _known(one)
    seconds = np.floor(one.times_s - one.times_s[0] + 0.25)
    is_first = np.append(True, np.diff(seconds) > 0)
    return replace(one, times_s=one.times_s[is_first], values=one.values[is_first])


def _period_s(times: Sequence[NDArray[np.float64]]) -> tuple[float, bool]:
    """The usual distance of two samples, and whether most have about that."""
    steps = [np.diff(one) for one in times[:_LOOKED_AT] if len(one) > 1]
    if not steps:
        return 1.0, True
    usual = float(np.median([np.median(one) for one in steps]))
    low, high = np.quantile(np.concatenate(steps), (0.1, 0.9))
    return usual, bool(high <= _REGULAR * max(low, 1e-9))
