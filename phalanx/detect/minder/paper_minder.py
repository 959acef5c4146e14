"""Minder as its paper describes it, and what the paper compares it with: for benchmarks, and to see what we added.

One z-score per window, the largest is the candidate, the same candidate without a break for four minutes is faulty,
and metrics are tried one after the other (arXiv 2411.01791, 4). Variants (5.3 to 5.6): distances of raw windows
(``raw``), of all metrics' embeddings joined (``joined``, the paper's CON), of one model of all metrics
(``one_model``, INT), Mahalanobis distances of statistics of windows (``mahalanobis``), without continuity, and other
distances than Euclid's.

The paper names no similarity threshold, and a z-score over N machines cannot exceed sqrt(N - 1). Thresholds are
therefore given as *deviations of the others*: how far a machine is from the mean of the other machines, in their
standard deviation, which has no such limit and means the same at 4 machines as at 1,000. `score_limit` turns them
into the z-score that the paper compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.mahalanobis import whitened, window_statistics
from phalanx.detect.minder.minder_weights import ONE_MODEL
from phalanx.detect.minder.similarity import Distance, candidates, distance_sums, first_steady, z_scores
from phalanx.detect.minder.window_encoder import WINDOW, Floats, WindowEncoder
from phalanx.detect.monitoring.metric_table import MetricTable

Representation = Literal["embedding", "raw", "joined", "one_model", "mahalanobis"]

ALL_METRICS = ""
"""In place of a metric's name, where metrics are joined."""


@dataclass(frozen=True)
class Variant:
    """What is compared, and how.

    Attributes:
        representation: of windows.
        metrics: tried in this order; of ``joined``, ``one_model`` and ``mahalanobis``: those that are joined.
        distance: between two windows.
        has_continuity: without, one window is enough.
        stride: samples between windows that are judged; 8: they do not overlap.
    """

    representation: Representation
    metrics: tuple[str, ...]
    distance: Distance = "euclidean"
    has_continuity: bool = True
    stride: int = 1

    @property
    def looks(self) -> tuple[str, ...]:
        """What is tried in turn: each metric, or all as one."""
        return self.metrics if self.representation in ("embedding", "raw") else (ALL_METRICS,)


@dataclass(frozen=True)
class PaperFinding:
    """The first faulty machine.

    Attributes:
        machine: its index.
        metric: by which it was found; empty where metrics are joined.
        since: index of the last sample of the first window in which it was the candidate.
        found: the same of the window in which the time of continuity was over.
        score: its z-score there.
    """

    machine: int
    metric: str
    since: int
    found: int
    score: float


Encoders = Mapping[str, WindowEncoder]
"""By metric; `ONE_MODEL` is the one of all metrics."""

Candidates = tuple[NDArray[np.integer], Floats]
"""Of each window: the machine with the largest z-score, and that score."""


def find_first(
    table: MetricTable, variant: Variant, encoders: Encoders, thresholds: Mapping[str, float], continuity: int = 240
) -> PaperFinding | None:
    """The machine that the paper's method calls faulty; None: none.

    Args:
        table: normalised, without gaps.
        thresholds: by metric, or of `ALL_METRICS`: deviations of the others.
        continuity: samples.
    """
    for metric, scores in window_scores(table, variant, encoders):
        found = first_of(
            candidates(scores), metric, score_limit(thresholds[metric], len(table.machines)), variant, continuity
        )
        if found is not None:
            return found
    return None


def first_of(
    found: Candidates, metric: str, limit: float, variant: Variant, continuity: int = 240
) -> PaperFinding | None:
    """The same by one metric, of the candidates of its windows.

    Args:
        found: of every window, whatever the stride.
        limit: the z-score that a candidate has to exceed.
    """
    who, scores = found[0][:: variant.stride], found[1][:: variant.stride]
    length = max(1, continuity // variant.stride) if variant.has_continuity else 1
    first = first_steady(who, scores, limit, length)
    if first is None:
        return None
    machine, start = first
    since, end = (at * variant.stride + WINDOW - 1 for at in (start, start + length - 1))
    return PaperFinding(machine, metric, since, end, float(scores[start + length - 1]))


def window_scores(table: MetricTable, variant: Variant, encoders: Encoders) -> Iterator[tuple[str, Floats]]:
    """One z-score per machine and window, by metric in order; one for all where they are joined."""
    for metric in variant.looks:
        yield metric, z_scores(distance_sums(represented(table, variant, encoders, metric), variant.distance))


def represented(table: MetricTable, variant: Variant, encoders: Encoders, metric: str) -> Floats:
    """What windows are compared by: [numbers, machines, windows]."""
    if variant.representation == "embedding":
        return encoders[metric].embed(table.of(metric))
    if variant.representation == "raw":
        return np.lib.stride_tricks.sliding_window_view(table.of(metric), WINDOW, axis=1).transpose(2, 0, 1)
    used = table.only(variant.metrics)
    if variant.representation == "one_model":
        return encoders[ONE_MODEL].embed(used.values)
    if variant.representation == "joined":
        return np.concatenate([encoders[metric].embed(used.of(metric)) for metric in used.metrics])
    return whitened(np.concatenate([window_statistics(used.of(metric)) for metric in used.metrics]))


def score_limit(deviations: float, machines: int) -> float:
    """The z-score over all machines of one that is so many deviations of the others from their mean.

    With t deviations and N machines the mean of all is t / N away from that of the others and their variance
    (N - 1) / N (1 + t² / N), so that z = t sqrt((N - 1) / (N + t²)): t among many, at most sqrt(N - 1) among few.
    """
    return float(deviations * np.sqrt((machines - 1) / (machines + deviations**2)))


def deviations_of(score: float, machines: int) -> float:
    """The inverse of `score_limit`; infinite for the largest score that there can be."""
    left = machines - 1 - score**2
    return float(score * np.sqrt(machines / left)) if left > 1e-6 * machines else float("inf")
