"""When a machine began to differ, found in hindsight: by the time of continuity minutes of evidence are there.

A smoothed score crosses its threshold seconds after the onset, the later the smaller the difference. What the machine
was like before, and what it has been like since, are known by then; each sample around the crossing is more like the
one or like the other, and the onset is where the sum of these odds turns (as in CUSUM charts).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.window_encoder import Floats

LEAD_S = 40.0
"""How long before the crossing an onset is looked for."""

BEFORE_S = 100.0
"""Before that, what the machine was like is taken from."""

_LATER_S, _AFTER_S = 20.0, 140.0
"""From the crossing on, when the difference has developed, and until when what it is like is taken from."""

_LEAST = 0.002
"""Of the metric's limits: less noise than that is not assumed."""

_LEAST_SAMPLES = 12
_MOST_ODDS = 3.0
"""Log-odds that one sample may add, so that a single outlier is no onset."""

_NEAR_S, _ABOUT = 12.0, 2.8
"""Onsets longer before the crossing are doubted; and log-odds within which two are about as likely."""

_BACK_S, _RISE_S = 12.0, 24.0
"""How long before the samples differ a slow rise may have begun, and how long it may take."""

_AS_LIKELY, _FAR_OFF = 1.0, 4.5
"""Log-odds within which two beginnings of a rise are about as likely; and those that one sample far off it costs."""

_PEERS = 64
"""Of more machines, so many stand for all."""


def peers_of(machine: int, like: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Some of those that a machine is compared with.

    Args:
        like: [machines], who is of its kind and does not differ.
    """
    others: NDArray[np.int64] = np.flatnonzero(like)
    others = others[others != machine]
    if len(others) > _PEERS:
        others = others[np.linspace(0, len(others) - 1, _PEERS).round().astype(int)]
    return others


def refine_onset(apart: Floats, crossing: int, period_s: float) -> int:
    """The sample from which it differs, at the crossing or some time before or after it; the crossing: no better one.

    Args:
        apart: [samples], the machine less its peers, in limits of the metric; NaN where it is not known.
        crossing: where the score did, an index of `apart`.
    """
    lead, later, after, near = (max(1, round(seconds / period_s)) for seconds in (LEAD_S, _LATER_S, _AFTER_S, _NEAR_S))
    earliest, latest = max(0, crossing - lead), min(len(apart), crossing + later)
    before, since = apart[:earliest], apart[latest : crossing + after]
    before, since = before[~np.isnan(before)], since[~np.isnan(since)]
    if min(len(before), len(since)) < _LEAST_SAMPLES:
        return crossing
    level, width = _level_and_width(before)
    values = apart[earliest:latest].astype(np.float64)
    odds = np.nan_to_num(_log_odds(values, before.astype(np.float64), since.astype(np.float64), level, width))
    ahead = np.cumsum(np.clip(odds, -_MOST_ODDS, _MOST_ODDS)[::-1])[::-1]
    if ahead.max() <= 2 * _MOST_ODDS:
        return crossing
    best = int(ahead.argmax())
    if crossing - earliest - best > near:
        # Noise that drifts ahead of a small difference is no part of it: of what is about as likely, the last.
        best = int(np.flatnonzero(ahead > ahead.max() - _ABOUT)[-1])
    return _begins_to_rise(apart, earliest + best, before, since, period_s)


def _begins_to_rise(apart: Floats, differs: int, before: Floats, since: Floats, period_s: float) -> int:
    """Where the line of the rise leaves the level before: the latest such sample of those that are about as likely.

    Args:
        differs: sample from which the machine differs clearly, an index of `apart`; the latest that can be found.
        before: samples of the time before.
        since: samples of the time when the difference has developed.
    """
    back, longest = (max(1, round(seconds / period_s)) for seconds in (_BACK_S, _RISE_S))
    first = max(0, differs - back)
    moments = np.arange(first, min(len(apart), differs + longest + max(1, longest // 4)))
    moments = moments[~np.isnan(apart[moments])]
    (low, width), (high, width_after) = _level_and_width(before), _level_and_width(since)
    begins = np.arange(first, differs + 1)[:, None, None]
    lasts = np.maximum(np.arange(longest + 1), 0.5)[:, None]  # a step is there with its first sample
    share = np.clip((moments - begins + 0.5) / lasts, 0, 1)
    widths = width + (width_after - width) * share
    off = (apart[moments] - low - (high - low) * share) / widths
    against = (np.minimum(0.5 * off**2, _FAR_OFF) + np.log(widths)).sum(axis=2).min(axis=1)  # however long it takes
    return first + int(np.flatnonzero(against <= against.min() + _AS_LIKELY)[-1])


def _level_and_width(values: Floats) -> tuple[float, float]:
    """Median and deviation, which outliers do not move."""
    level = float(np.median(values))
    return level, max(1.4826 * float(np.median(np.abs(values - level))), _LEAST)


def _log_odds(
    values: NDArray[np.float64], before: NDArray[np.float64], since: NDArray[np.float64], level: float, width: float
) -> NDArray[np.float64]:
    """Of each value being one of those since the onset rather than before it.

    Both are like those seen, which steps may spread widely; before, some are far off; since then, some are on the way.
    """
    tails = _normal(values - level, 4 * width)
    low, high = min(level, float(since.min())), max(level, float(since.max()))
    on_the_way = ((values >= low) & (values <= high)) / max(high - low, width)
    of_before = 0.9 * _density(values, before, width) + 0.1 * tails
    of_since = 0.85 * _density(values, since, width) + 0.15 * on_the_way
    tiny = 1e-9 / width
    found: NDArray[np.float64] = np.log(of_since + tiny) - np.log(of_before + tiny)
    return found


def _density(values: NDArray[np.float64], seen: NDArray[np.float64], width: float) -> NDArray[np.float64]:
    found: NDArray[np.float64] = _normal(values[:, None] - seen[None], width).mean(axis=1)
    return found


def _normal(away: NDArray[np.float64], width: float) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.exp(-0.5 * np.square(away / width)) / (width * np.sqrt(2 * np.pi))
    return found
