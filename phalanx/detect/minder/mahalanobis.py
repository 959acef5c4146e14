"""The baseline that Minder is compared with: Mahalanobis distances between statistics of windows.

Of each window of 8 samples and each metric: mean, variance, skewness and kurtosis (arXiv 2411.01791, 6.1). What the
paper leaves open and is ours: the statistics are standardised, their covariance is taken over all machines and
windows of the call, and the principal components that hold 95 % of the variance are kept. Scaled to unit variance
they have the Mahalanobis distance as their Euclidean one.
"""

from __future__ import annotations

import numpy as np

from phalanx.detect.minder.window_encoder import WINDOW, Floats

STATISTICS = 4

_EXPLAINED = 0.95
"""Of the variance, that the components which are kept hold."""

_LEAST_VARIANCE = 1e-10
"""Of samples between 0 and 1: of less, skewness and kurtosis would be those of rounding."""


def window_statistics(samples: Floats) -> Floats:
    """Mean, variance, skewness and kurtosis of every window: [4, machines, windows] of [machines, samples]."""
    shifted = np.lib.stride_tricks.sliding_window_view(samples, WINDOW, axis=1)
    found = np.zeros((STATISTICS, *shifted.shape[:2]), np.float32)
    mean, variance, third, fourth = found
    for at in range(WINDOW):
        mean += shifted[..., at]
    mean /= WINDOW
    away, power = np.empty_like(mean), np.empty_like(mean)
    for at in range(WINDOW):
        np.subtract(shifted[..., at], mean, out=away)
        np.multiply(away, away, out=power)
        variance += power
        power *= away
        third += power
        power *= away
        fourth += power
    found[1:] /= WINDOW
    safe = np.maximum(variance, _LEAST_VARIANCE)
    fourth /= safe * safe
    third /= safe * np.sqrt(safe)
    return found


def whitened(features: Floats) -> Floats:
    """Principal components with unit variance: [components, machines, windows] of [features, machines, windows]."""
    flat = features.reshape(len(features), -1)
    scale = flat.std(axis=1, keepdims=True)
    flat = (flat - flat.mean(axis=1, keepdims=True)) / np.maximum(scale, 1e-9)
    values, vectors = np.linalg.eigh(np.cov(flat).astype(np.float64))
    values, vectors = values[::-1], vectors[:, ::-1]
    kept = int(np.searchsorted(np.cumsum(values) / values.sum(), _EXPLAINED)) + 1
    turned = (vectors[:, :kept] / np.sqrt(np.maximum(values[:kept], 1e-9))).T.astype(np.float32)
    found: Floats = (turned @ flat).reshape(kept, *features.shape[1:])
    return found
