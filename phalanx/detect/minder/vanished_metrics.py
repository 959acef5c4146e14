"""Metrics that a machine no longer delivers while the others do: the only sign of a GPU that fell off its bus.

A gap is filled where it is short (`machine_history.py`); one of minutes says something. Where many machines lack a
metric at once, the collector is at fault, not they: such samples do not count.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.window_encoder import Floats

PRESENT = 0.75
"""Share of the machines that must have a metric for its lack to mean something."""

_RECENT = 30
"""Samples in which a machine that has a metric must have delivered it."""


class VanishedMetrics:
    """When each machine last delivered each metric.

    Attributes:
        last: [metrics, machines], the newest sample that was delivered; -1: none ever was.
        since: [metrics, machines], the first sample that was lacking of the gap that `lacking` tells of.
        lacking: [metrics, machines], who has been without it for long, while most others delivered it.
        seen: samples so far.
    """

    def __init__(self, metrics: int, machines: int, lacking: int) -> None:
        self.last = np.full((metrics, machines), -1, np.int64)
        self.since = np.full((metrics, machines), -1, np.int64)
        self.lacking = np.zeros((metrics, machines), bool)
        self._lacking = lacking
        self.seen = 0
        self._reported = np.zeros((metrics, machines), bool)
        # Samples so far in which most machines had the metric, now and when each machine last delivered it.
        self._had = np.zeros(metrics, np.int64)
        self._had_at_last = np.zeros((metrics, machines), np.int64)

    def add(self, values: Floats) -> NDArray[np.int64]:
        """More samples, fewer than what counts as lacking: [metrics, machines, samples].

        Returns:
            machines that have come to lack a metric; each is told once, until it is back.
        """
        count = values.shape[2]
        known = ~np.isnan(values)
        moments = self.seen + np.arange(count)
        last = np.maximum.accumulate(np.where(known, moments, self.last[..., None]), axis=2)
        # Who delivered at that moment decides, not who does at the end of the block: a gap may end within it.
        is_there = (last >= 0) & (moments - last < _RECENT)
        had = self._had[:, None] + np.cumsum(is_there.mean(axis=1) >= PRESENT, axis=1)
        at_last = np.where(
            last >= self.seen,
            np.take_along_axis(had[:, None], np.maximum(last - self.seen, 0), axis=2),
            self._had_at_last[..., None],
        )
        # Who never had it is another kind of machine.
        is_lacking = (last >= 0) & (had[:, None] - at_last >= self._lacking)
        self.lacking = is_lacking.any(axis=2)
        self.since = np.where(self.lacking, self.last + 1, -1)
        self.last, self._had, self._had_at_last = last[..., -1], had[:, -1], at_last[..., -1]
        self.seen += count
        new = self.lacking & ~self._reported
        self._reported = is_lacking[..., -1]
        return np.flatnonzero(new.any(axis=0))
