"""Whether the GPUs of a job do more than they did while habits were learnt.

The first minute may lie in an evaluation or a restart, in which stages of a pipeline do the same and offsets have other
sizes: what was learnt then is of no use once the job trains. A fault makes a job do less, never more, so that habits
can be learnt anew, and no fault is taken for one, where the job does something else that is more work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.window_encoder import Floats

_WORK = ("gpu_tensor_core_activity", "gpu_power_draw", "gpu_nvlink_bandwidth")
"""More of these is more work; others tell of waiting too."""

_NO_LESS, _MORE = 0.98, 1.05
"""Of what it was: means of a minute hold parts of steps, so that they scatter by some per cent."""

TWICE = 2.0
"""As much: half of the time from which habits were learnt was no work, so that a median is of neither state."""


class JobWork:
    """Of one job, as samples come in."""

    def __init__(self, metrics: Sequence[str], samples: int) -> None:
        """For samples of these metrics, of which so many are compared."""
        self._rows = [row for row, name in enumerate(metrics) if name in _WORK]
        self._recent = np.full((len(self._rows), samples), np.nan, np.float32)
        self._learnt: NDArray[np.floating] = np.full(len(self._rows), np.nan)

    def add(self, values: Floats) -> None:
        """More samples: [metrics, machines, samples]; NaN where nothing was measured."""
        kept = values[self._rows][:, :, -self._recent.shape[1] :]
        known = ~np.isnan(kept)
        # The machines' mean: what a few do is no more than a few per cent of it.
        sums = np.where(known, kept, 0).sum(axis=1)
        means = np.divide(sums, known.sum(axis=1), out=np.full_like(sums, np.nan), where=known.any(axis=1))
        self._recent = np.concatenate([self._recent, means], axis=1)[:, -self._recent.shape[1] :]

    def learn(self) -> None:
        """The latest samples are what habits were learnt from."""
        self._learnt = self._level()

    def is_more(self, than: float = _MORE) -> bool:
        """Whether the latest samples are so much more work than those, and less by no metric; unknown: no."""
        change = self._level() / np.maximum(self._learnt, 1e-6)
        return bool(len(change) and (change > _NO_LESS).all() and change.max() > than)

    def _level(self) -> NDArray[np.floating]:
        known = ~np.isnan(self._recent)
        count = known.sum(axis=1)
        sums = np.where(known, self._recent, 0).sum(axis=1)
        found: NDArray[np.floating] = np.where(2 * count > self._recent.shape[1], sums / np.maximum(count, 1), np.nan)
        return found
