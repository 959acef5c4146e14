"""The change point of a noisy series: where it begins to grow, at once or slowly, tested against its own noise.

A series is brought to at most `POINTS` means of consecutive values, after single outliers were pulled to their
neighbours (Hampel's filter). Two models are fitted by least squares for every possible onset: a *jump* (two levels) and
a *creep* (a level, then a straight line up; the onset may be the first value). The better one counts if

- it grew by a least share,
- the growth is many standard errors, where these come from the means of long batches, so that noise which lasts for
  many steps (a busy neighbour) counts in full,
- means of batches before and after hardly overlap, and the newest values still are where it grew to,
- for a creep, batches after the onset rise one after the other (Kendall's rank correlation).

So noise that wanders as much as it is said to have grown is no change. Values are positive (seconds); growth is a share
of the level before.

A series that grew more than once fits neither model, since each jump is noise around the fit of another. So levels with
up to `CHANGES` jumps among them are fitted too (by dynamic programming over all onsets). They count where they explain
more than one change does, by Schwarz's criterion, and the newest level is above the first; each rise is then tested
against the level before it as above, more strictly, because its onset was chosen from more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import Field

from phalanx.core.config import Config

Floats = np.ndarray[Any, np.dtype[np.float64]]

POINTS = 300
"""Means of a series that are looked at; more would find the same change later or earlier by less than its noise."""

CHANGES = 3
"""Jumps of a series with several, at most."""

_HAMPEL, _OUTLIER = 5, 4.0  # neighbours on each side; robust standard deviations
_MAD_TO_SIGMA = 1.4826
_BATCHES = 6
_STILL = 0.5
_KENDALL = 0.5
_STRICTER = 1.5  # times the standard errors, of one rise among several
_PER_CHANGE = 6  # numbers that a further change must be worth in Schwarz's criterion: noise lasts, steps are not many


class ChangePolicy(Config):
    """What counts as a change."""

    least_growth: float = Field(
        0.01, gt=0, lt=10, description="growth that counts, as a share of the level before; less is never reported"
    )
    least_steps: int = Field(20, ge=4, description="steps before and after an onset; with fewer nothing is said")
    least_z: float = Field(6.0, ge=2, description="standard errors that the growth must be")
    least_separation: float = Field(
        0.9, ge=0.5, le=1, description="chance that the mean of some steps after the onset is above one before it"
    )


@dataclass(frozen=True)
class Change:
    """Since value number `onset` (from 0) the series is higher than before.

    Attributes:
        growth: until now, as a share of `before`.
        before, after: level before; newest level.
        z: standard errors that the growth is.
        separation: chance that a mean of some late values is above one of early ones.
        is_over: the newest values are back where they were.
    """

    shape: Literal["jump", "creep"]
    onset: int
    before: float
    after: float
    growth: float
    z: float
    separation: float
    is_over: bool = False


def find_change(values: Sequence[float] | Floats, policy: ChangePolicy) -> Change | None:
    """The growth that explains most of a series, if it counts; None: it is flat, falls, or is too short or noisy."""
    series = np.asarray(values, np.float64)
    if len(series) < 2 * policy.least_steps or not np.isfinite(series).all() or series.max() <= 0:
        return None
    smooth = without_outliers(series)
    width = -(-len(smooth) // POINTS)
    points = _block_means(smooth, width)
    least = max(-(-policy.least_steps // width), 3)
    if len(points) < 2 * least:
        return None
    jump = _fit_jump(points, least)
    creep = _fit_creep(points, least)
    tried = sorted((one for one in (jump, creep) if one is not None), key=lambda one: one.error)
    for fit in tried:
        found = _judge(fit, points, policy, least)
        if found is not None:
            return _on_raw(found, smooth, width, policy.least_steps)
    return None


def find_changes(values: Sequence[float] | Floats, policy: ChangePolicy) -> list[tuple[Change, int, int]]:
    """All changes that count, where one or several explain a series best, the largest first.

    Returns:
        of each the change, and first and last (not with it) of the values it was found among, from which its onset
        counts. A rise whose level was left again is over; of one of which a share stayed, only that share is told.
    """
    series = np.asarray(values, np.float64)
    several = _several(series, policy)
    if several:
        return several
    first = find_change(series, policy)
    return [] if first is None else [(first, 0, len(series))]


def _several(series: Floats, policy: ChangePolicy) -> list[tuple[Change, int, int]]:
    """Changes of a series of levels, if there are several levels and the newest is above the first."""
    if len(series) < 3 * policy.least_steps or not np.isfinite(series).all() or series.max() <= 0:
        return []
    smooth = without_outliers(series)
    width = -(-len(smooth) // POINTS)
    points = _block_means(smooth, width)
    least = max(-(-policy.least_steps // width), 3)
    single = [one for one in (_fit_jump(points, least), _fit_creep(points, least)) if one is not None]
    bounds = _best_levels(points, least, [one.error for one in single])
    if not bounds:
        return []
    stricter = policy.model_copy(update={"least_z": _STRICTER * policy.least_z})
    sides = [points[begin:end] for begin, end in itertools.pairwise(bounds)]
    levels = [float(side.mean()) for side in sides]
    if _jump_between(sides[0], sides[-1], stricter, least) is None:
        return []
    found = []
    for number in range(1, len(sides)):
        change = _jump_between(sides[number - 1], sides[number], stricter, least)
        if change is None:
            continue
        raw = [len(smooth) % width + bound * width if bound else 0 for bound in bounds[number - 1 : number + 2]]
        placed = _on_raw(change, smooth[raw[0] : raw[2]], width, policy.least_steps)
        lasting = min(levels[number:])
        is_over = lasting < change.before * (1 + policy.least_growth)
        after = change.after if is_over else lasting
        growth = after / change.before - 1
        found.append((replace(placed, after=after, growth=growth, is_over=is_over), raw[0], raw[2]))
    return sorted(found, key=lambda one: (one[0].is_over, -one[0].growth))


def _jump_between(before: Floats, after: Floats, policy: ChangePolicy, least: int) -> Change | None:
    """The growth from some values to others, if it counts as a jump."""
    both, onset = np.concatenate([before, after]), len(before)
    low, high = float(before.mean()), float(after.mean())
    fitted = np.where(np.arange(len(both)) < onset, low, high)
    fit = _Fit("jump", onset, low, high - low, float(((both - fitted) ** 2).sum()), fitted)
    found = _judge(fit, both, policy, least)
    return None if found is None else replace(found, is_over=False)


def _best_levels(points: Floats, least: int, single_errors: Sequence[float]) -> list[int]:
    """Bounds of the levels, first and end with them, that explain most; empty: one change explains as much."""
    count = len(points)
    if count < 3 * least or not single_errors:
        return []
    # A further jump must be worth its numbers; around a fit without any error nothing is.
    floor = 1e-12 * float((points**2).sum())
    price = np.log(count) * _PER_CHANGE
    least_score = count * np.log(max(min(single_errors), floor))
    best: list[int] = []
    for changes, (error, bounds) in enumerate(_level_fits(points, least), start=2):
        score = count * np.log(max(error, floor)) + (changes - 1) * price
        if score < least_score:
            least_score, best = score, bounds
    return best


def _level_fits(points: Floats, least: int) -> Iterator[tuple[float, list[int]]]:
    """The least squared error of 2 to `CHANGES` jumps, and the bounds of their levels."""
    count = len(points)
    sums, squares = (np.concatenate([[0.0], np.cumsum(column)]) for column in (points, points**2))
    begin, end = np.arange(count + 1)[:, None], np.arange(count + 1)[None, :]
    length = np.maximum(end - begin, 1)
    errors = squares[None, :] - squares[:, None] - (sums[None, :] - sums[:, None]) ** 2 / length
    errors = np.where(end - begin >= least, errors, np.inf)
    until, origins = errors[0], []
    for changes in range(1, CHANGES + 1):
        total = until[:, None] + errors
        origin = np.argmin(total, axis=0)
        until = total[origin, np.arange(count + 1)]
        origins.append(origin)
        if changes > 1 and np.isfinite(until[-1]):
            bounds = [count]
            for former in reversed(origins):
                bounds.insert(0, int(former[bounds[0]]))
            yield float(until[-1]), [0, *bounds]


def find_jump_at(values: Sequence[float] | Floats, onset: int, policy: ChangePolicy) -> Change | None:
    """The growth from the values before number `onset` to the others, if it counts as a jump; `onset` is known."""
    smooth = without_outliers(np.asarray(values, np.float64))
    least = policy.least_steps
    if min(onset, len(smooth) - onset) < least:
        return None
    before, after = float(smooth[:onset].mean()), float(smooth[onset:].mean())
    fitted = np.where(np.arange(len(smooth)) < onset, before, after)
    fit = _Fit("jump", onset, before, after - before, float(((smooth - fitted) ** 2).sum()), fitted)
    return _judge(fit, smooth, policy, least)


def without_outliers(series: Floats) -> Floats:
    """Values that lie far from the median of their neighbours are replaced by it: one slow step is no change."""
    if len(series) <= 2 * _HAMPEL:
        return series
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(series, _HAMPEL, mode="reflect"), 2 * _HAMPEL + 1)
    centre = np.median(windows, axis=1)
    spread = _MAD_TO_SIGMA * np.median(np.abs(windows - centre[:, None]), axis=1)
    # Where neighbours are all alike, as steps that were reported together, the series' own spread is the measure.
    spread = np.maximum(spread, _MAD_TO_SIGMA * np.median(np.abs(series - centre)))
    return np.where(np.abs(series - centre) > _OUTLIER * spread, centre, series)


@dataclass(frozen=True)
class _Fit:
    shape: Literal["jump", "creep"]
    onset: int
    level: float
    grown: float
    error: float
    fitted: Floats


def _fit_jump(points: Floats, least: int) -> _Fit | None:
    count = len(points)
    onsets = np.arange(least, count - least + 1)
    sums, squares = np.cumsum(points), float((points**2).sum())
    left = sums[onsets - 1] / onsets
    right = (sums[-1] - sums[onsets - 1]) / (count - onsets)
    errors = squares - onsets * left**2 - (count - onsets) * right**2
    best = int(np.argmin(errors))
    onset, grown = int(onsets[best]), float(right[best] - left[best])
    if grown <= 0:
        return None
    fitted = np.where(np.arange(count) < onset, left[best], right[best])
    return _Fit("jump", onset, float(left[best]), grown, float(errors[best]), fitted)


def _fit_creep(points: Floats, least: int) -> _Fit | None:
    count = len(points)
    place = np.arange(count)
    # A line takes more values than a level to be told from chance.
    onsets = np.arange(0, max(count - 2 * least, 0) + 1)
    ramps = np.maximum(place[None, :] - onsets[:, None], 0).astype(np.float64)
    centred = ramps - ramps.mean(axis=1, keepdims=True)
    deviations = points - points.mean()
    power = (centred**2).sum(axis=1)
    slopes = centred @ deviations / power
    errors = float((deviations**2).sum()) - slopes**2 * power
    errors[slopes <= 0] = np.inf
    # An onset between the first value and the least stretch before it would be a level of too few values.
    errors[1:least] = np.inf
    best = int(np.argmin(errors))
    if not np.isfinite(errors[best]):
        return None
    level = float(points.mean() - slopes[best] * ramps[best].mean())
    fitted = level + slopes[best] * ramps[best]
    return _Fit("creep", int(onsets[best]), level, float(fitted[-1] - level), float(errors[best]), fitted)


def _judge(fit: _Fit, points: Floats, policy: ChangePolicy, least: int) -> Change | None:
    if fit.level <= 0 or fit.grown < policy.least_growth * fit.level:
        return None
    early, late = _early_and_late(fit, points, least)
    separation = _chance_above(late, early)
    z = fit.grown / max(_standard_error(fit, points, least), 1e-12)
    if separation < policy.least_separation or z < policy.least_z:
        return None
    if fit.shape == "creep" and _kendall(_batches(points[fit.onset :], least)) < _KENDALL:
        return None
    newest = float(np.median(points[-least:]))
    is_over = newest < fit.level + _STILL * fit.grown
    after = fit.level + fit.grown
    return Change(fit.shape, fit.onset, fit.level, after, fit.grown / fit.level, z, separation, is_over)


def _early_and_late(fit: _Fit, points: Floats, least: int) -> tuple[Floats, Floats]:
    """Means of batches before and after: of a creep its last third, and where it has no before, its first."""
    if fit.shape == "jump":
        return _batches(points[: fit.onset], least), _batches(points[fit.onset :], least)
    third = max((len(points) - fit.onset) // 3, least // 2, 1)
    return _batches(points[: max(fit.onset, third)], least), _batches(points[-third:], least)


def _chance_above(late: Floats, early: Floats) -> float:
    order = np.sort(early)
    below = np.searchsorted(order, late, side="left") + np.searchsorted(order, late, side="right")
    return float(below.sum() / (2 * len(early) * len(late)))


def _standard_error(fit: _Fit, points: Floats, least: int) -> float:
    """Of the growth, as means of batches scatter around the fit: noise that lasts as long as a batch counts in full."""
    rest = points - fit.fitted
    sides = [rest[: fit.onset], rest[fit.onset :]] if fit.onset >= least else [rest]
    batches = [_batches(side, least) for side in sides]
    spread = np.sqrt(sum(float((one**2).sum()) for one in batches) / max(sum(map(len, batches)) - 2, 1))
    spread *= _lasting(batches)
    if fit.shape == "jump":
        return float(spread * np.sqrt(sum(1 / len(one) for one in batches)))
    return float(spread * np.sqrt(12 / len(batches[-1]) + (1 / len(batches[0]) if len(batches) > 1 else 0)))


def _lasting(batches: Sequence[Floats]) -> float:
    """By how much noise that lasts longer than a batch widens the error: as in a first-order autoregression."""
    products = sum(float((one[1:] * one[:-1]).sum()) for one in batches)
    squares = sum(float((one**2).sum()) for one in batches)
    count = sum(len(one) for one in batches)
    # Around fitted levels the correlation comes out too small, by about so much.
    correlation = products / squares + len(batches) / count if squares else 0.0
    correlation = min(max(correlation, 0.0), 0.9)
    return float(np.sqrt((1 + correlation) / (1 - correlation)))


def _batches(side: Floats, least: int) -> Floats:
    return _block_means(side, max(len(side) // max(_BATCHES, min(len(side) // least, 12)), 1))


def _block_means(series: Floats, width: int) -> Floats:
    """Means of so many consecutive values; those that are too many at the beginning of the series are left out."""
    whole = series[len(series) % width :]
    means: Floats = whole.reshape(-1, width).mean(axis=1)
    return means


def _kendall(values: Floats) -> float:
    if len(values) < 3:
        return 1.0
    signs = np.sign(values[None, :] - values[:, None])
    return float(signs[np.triu_indices(len(values), 1)].mean())


def _on_raw(found: Change, smooth: Floats, width: int, least: int) -> Change:
    """The same change with its onset among the values themselves, where they were joined into means."""
    onset = len(smooth) % width + found.onset * width if found.onset else 0
    if found.shape == "jump" and width > 1:
        low, high = max(onset - 2 * width, least), min(onset + 2 * width, len(smooth) - least)
        around = np.arange(low, high + 1)
        middle = (found.before + found.after) / 2
        # By counts of values on the wrong side of the middle, which no outlier moves.
        above = np.concatenate([[0], np.cumsum(smooth > middle)])
        wrong = above[around] + (len(smooth) - around) - (above[-1] - above[around])
        onset = int(around[np.argmin(wrong)])
    return replace(found, onset=onset)
