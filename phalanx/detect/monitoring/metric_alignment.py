"""Samples as they come, onto one grid of time: by the nearest sample within a bound, never across a long gap.

Exporters are scraped at moments of their own, and clocks differ. What a machine did not report stays missing (NaN):
that a metric vanishes is evidence, which filling would hide.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.monitoring.metric_catalogue import Combine
from phalanx.detect.monitoring.metric_table import MetricTable

NEAREST_S = 5.0
"""A sample stands for moments up to so far from it: of a gap of 10 s nothing is left, in a longer one a hole."""


@dataclass(frozen=True)
class Grid:
    """Moments of a table.

    Attributes:
        start_s: the first, since 1970.
        samples: how many.
        period_s: between them.
    """

    start_s: float
    samples: int
    period_s: float = 1.0

    @classmethod
    def between(cls, start_s: float, end_s: float, period_s: float = 1.0) -> Grid:
        """Both ends belong to it."""
        return cls(start_s, int((end_s - start_s) / period_s + 1e-6) + 1, period_s)

    def part(self, first: int, samples: int) -> Grid:
        """From one of its moments on, so many or as many as there are."""
        return Grid(self.start_s + first * self.period_s, min(samples, self.samples - first), self.period_s)

    def times_s(self) -> NDArray[np.float64]:
        """All moments."""
        return self.start_s + self.period_s * np.arange(self.samples, dtype=np.float64)


def nearest(
    times_s: NDArray[np.float64], values: NDArray[np.float64], moments_s: NDArray[np.float64], within_s: float
) -> NDArray[np.float32]:
    """The value of the sample nearest to each moment; NaN where none is within the bound.

    Args:
        times_s: ascending; moments that occur twice keep the later value.
    """
    known = ~np.isnan(values)
    times_s, values = times_s[known], values[known]
    found = np.full(len(moments_s), np.nan, np.float32)
    if len(times_s) == 0:
        return found
    after = np.clip(np.searchsorted(times_s, moments_s, side="right"), 1, max(1, len(times_s) - 1))
    if len(times_s) > 1:
        is_before = moments_s - times_s[after - 1] <= times_s[after] - moments_s
        at = np.where(is_before, after - 1, after)
    else:
        at = np.zeros(len(moments_s), np.int64)
    is_near = np.abs(times_s[at] - moments_s) <= within_s + 1e-9
    found[is_near] = values[at[is_near]]
    return found


def combine(of_devices: NDArray[np.float32], how: Combine) -> NDArray[np.float32]:
    """Devices [devices, samples] to their machine [samples]; those without a value do not count (NaN: none has one)."""
    if len(of_devices) == 1:
        only: NDArray[np.float32] = of_devices[0]
        return only
    known = ~np.isnan(of_devices)
    count = known.sum(axis=0)
    if how == "max":
        found = np.where(known, of_devices, -np.inf).max(axis=0)
    else:
        found = np.where(known, of_devices, 0).sum(axis=0)
        if how == "mean":
            found = found / np.maximum(count, 1)
    combined: NDArray[np.float32] = np.where(count > 0, found, np.nan).astype(np.float32)
    return combined


def fill_short_gaps(table: MetricTable, within_s: float = NEAREST_S) -> MetricTable:
    """Missing samples become the nearest one of the same machine within the bound; of longer gaps only the ends."""
    steps = int(within_s / table.period_s + 1e-9)
    values = table.values.copy()
    samples = np.arange(table.samples)
    for row in range(len(table.metrics)):  # by metric: a part of the memory
        part = values[row]
        known = ~np.isnan(part)
        if known.all():
            continue
        before = np.maximum.accumulate(np.where(known, samples, -(1 << 30)), axis=1)
        after = np.minimum.accumulate(np.where(known, samples, 1 << 30)[:, ::-1], axis=1)[:, ::-1]
        at = np.where(samples - before <= after - samples, before, after)
        is_near = np.abs(at - samples) <= steps
        filled = np.take_along_axis(part, np.clip(at, 0, table.samples - 1), axis=1)
        values[row] = np.where(is_near, filled, part)
    return MetricTable(values, table.metrics, table.machines, table.start_s, table.period_s)
