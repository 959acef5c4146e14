"""How unlike the others each machine is at each moment, as Minder has it (arXiv 2411.01791, 4.3 and 4.4).

The sum of a machine's distances from all others, as a z-score over machines; the machine with the largest score is the
candidate of the window where that exceeds a threshold; who is candidate without a break for the time of continuity is
faulty. A z-score over N machines cannot exceed sqrt(N - 1), so that thresholds are calibrated per number of machines.

Among many machines distances are taken from a sample of them: exact up to 64, and beyond within a few per cent of
the sums over all (tested), in time that grows with N.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.window_encoder import Floats

Distance = Literal["euclidean", "manhattan", "chebyshev"]

REFERENCES = 64
"""Machines from which distances are taken where there are more."""

_CELLS = 1 << 20
"""Differences that are held at once: 4 MiB."""


def distance_sums(embeddings: Floats, distance: Distance = "euclidean", references: int = REFERENCES) -> Floats:
    """Sum of each machine's distances from all others: [machines, windows] of [numbers, machines, windows].

    Args:
        references: of more machines than these, so many stand for all, evenly spread over their order; at least 2.
    """
    _, machines, windows = embeddings.shape
    chosen = np.arange(machines)
    if machines > references:
        chosen = np.unique(np.linspace(0, machines - 1, references).round().astype(int))
    found = np.empty((machines, windows), np.float32)
    high = max(1, _CELLS // max(len(chosen) * windows, 1))
    for first in range(0, machines, high):
        found[first : first + high] = _sums_of(embeddings[:, first : first + high], embeddings[:, chosen], distance)
    # A machine that is one of the sample is not compared with itself.
    others = np.full(machines, len(chosen), np.float32)
    others[chosen] -= 1
    found *= ((machines - 1) / np.maximum(others, 1))[:, None]
    return found


def _sums_of(part: Floats, chosen: Floats, distance: Distance) -> Floats:
    total: Floats = np.zeros((part.shape[1], chosen.shape[1], part.shape[2]), np.float32)
    for number in range(part.shape[0]):
        apart = part[number][:, None] - chosen[number][None]
        if distance == "euclidean":
            total += np.square(apart, out=apart)
        elif distance == "manhattan":
            total += np.abs(apart, out=apart)
        else:
            np.maximum(total, np.abs(apart, out=apart), out=total)
    if distance == "euclidean":
        np.sqrt(total, out=total)
    found: Floats = total.sum(axis=1)
    return found


def z_scores(sums: Floats) -> Floats:
    """(x - mean) / deviation over machines; 0 where all are alike: [machines, windows]."""
    middle = sums.mean(axis=0, keepdims=True)
    deviation = sums.std(axis=0, keepdims=True)
    found: Floats = np.divide(sums - middle, deviation, out=np.zeros_like(sums), where=deviation > 1e-9)
    return found


def largest_score(machines: int) -> float:
    """That a z-score over so many can have."""
    return float(np.sqrt(max(machines - 1, 0)))


def candidates(scores: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Of each window: the machine with the largest score, and that."""
    who = scores.argmax(axis=0)
    return who, np.take_along_axis(scores, who[None], axis=0)[0]


def steady_score(who: NDArray[np.integer], score: Floats, continuity: int) -> float:
    """The largest threshold at which some candidate would still be called faulty; 0: none, at any.

    Of healthy data it is what a threshold has to exceed.
    """
    best = 0.0
    for start, length in _runs(who):
        if length >= continuity:
            run = score[start : start + length]
            best = max(best, float(np.lib.stride_tricks.sliding_window_view(run, continuity).min(axis=1).max()))
    return best


def first_steady(who: NDArray[np.integer], score: Floats, threshold: float, continuity: int) -> tuple[int, int] | None:
    """The first machine that is the candidate above the threshold without a break.

    Args:
        who: the machine of each window, as `candidates` gives it.
        score: its z-score.

    Returns:
        its index and the window from which it has been; None: there is none.
    """
    above = np.where(score > threshold, who, -1)
    for start, length in _runs(above):
        if above[start] >= 0 and length >= continuity:
            return int(above[start]), start
    return None


def _runs(who: NDArray[np.integer]) -> list[tuple[int, int]]:
    """Where the same one begins, and for how many windows."""
    starts = np.flatnonzero(np.diff(who, prepend=who[:1] - 1))
    return list(zip(starts.tolist(), np.diff(np.append(starts, len(who))).tolist(), strict=True))
