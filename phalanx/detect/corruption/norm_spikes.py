"""Gradient norms that jump: the cheap sign of corrupt arithmetic, after which a step is computed again.

As arXiv 2604.00726 has it: flipped bits in products that do harm show in the norm of the gradient, so a jump of it is
reason to compute the step again; a healthy jump comes again with the same bits, a corrupt one does not. What changes
the norm little goes unseen: digests and replays see it (docs/benchmarks/detect_corruption.md compares them).
"""

from __future__ import annotations

import math
import statistics
from collections import deque

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_LEAST_SPREAD = 0.02  # of the logarithm: norms of a smooth stretch differ by a few per cent


class NormHistory:
    """The norms of the last healthy steps, and whether one stands out.

    Norms vary by factors, so logarithms are compared, with the median and the median absolute deviation.

    Args:
        sigma: standard deviations above the median from which a norm is a jump.
        window: steps that are remembered.
        least: steps before anything is judged.
    """

    def __init__(self, sigma: float, window: int = 64, least: int = 16) -> None:
        self._sigma, self._least = sigma, least
        self._logs: deque[float] = deque(maxlen=window)

    def is_spike(self, norm: float) -> bool:
        """Whether this norm is far above the others; one that is not finite always is."""
        if not math.isfinite(norm):
            return True
        if len(self._logs) < self._least or norm <= 0:
            return False
        middle = statistics.median(self._logs)
        spread = _MAD_TO_SIGMA * statistics.median(abs(one - middle) for one in self._logs)
        return math.log(norm) - middle > self._sigma * max(spread, _LEAST_SPREAD)

    def add(self, norm: float) -> None:
        """A step was made with this norm."""
        if math.isfinite(norm) and norm > 0:
            self._logs.append(math.log(norm))
