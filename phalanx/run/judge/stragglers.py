"""Stragglers: which host (or rank) is slow by its own time, though all of them share one step time.

Own times (``busy_s``: a step without waiting in collectives) are compared in blocks of steps, among units that do the
same work:

1. Each time is divided by the median over the units of that step, so that what slows all of them cancels; a unit's
   value of the block is the median of the logarithms over its steps, so that single stalls do not count.
2. How much values vary by chance is learnt from their differences from block to block (the median of these, which
   neither a slow unit nor lasting differences between units change), times `_INFLATION`, for noise that is not
   independent from block to block.
3. Per unit, what exceeds half of the slowness that is looked for is added up, as long as the sum is positive: CUSUM
   (Page, *Continuous inspection schemes*, Biometrika 41, 1954).
4. The sum's limit follows from how seldom a false alarm may be, over all units and steps (a union bound), through
   Siegmund's approximation of the average run length (*Sequential Analysis*, 1985, section 2.6).
5. A unit is named when its sum is over the limit, all but one of its last `min_blocks` values are over the reference
   (a stall that has passed is not a slow host), and their mean sticks out from those of the other units (a robust z
   over the units, with the quantile for as many units). Several that begin at once have a cause in common, such as
   their rack: they are listed in `SlowJudge.together` and not named.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from phalanx.core.config import Config

_INFLATION = 1.5
_TO_SD = 1.4826  # from a median absolute deviation to a standard deviation, for a normal distribution
# Own times may agree more closely for a while than they do in the long run: with less noise than this any small
# difference would be over the limit.
_LEAST_NOISE = 0.002
_OVERSHOOT = 1.166  # Siegmund's correction for looking at the sum only at whole blocks
_CHANCE_SD = 3.0  # standard deviations that chance stays within
_NOISE_BLOCKS = 30
_MEAN_BLOCKS = 20
_AT_ONCE = 2  # more units than this that become slow in the same block are not slow each for itself
_OF_ALL_AT_ONCE = 0.02  # the same as a share of all units, for those that were slow when the judge began
_ENOUGH_UNITS = 8  # from so many peers on, a unit has to stick out among them as well

Values = NDArray[np.float64]


class SlowConfig(Config):
    """What counts as slow."""

    ratio: float = Field(1.1, gt=1.01, le=10, description="how many times the usual own time a slow unit takes")
    block_steps: int = Field(10, ge=4, le=1000, description="steps that are put together")
    min_blocks: int = Field(5, ge=2, le=100, description="blocks for which a unit has to be slow")
    false_alarms: float = Field(
        0.01, gt=0, lt=1, description="wrong names that may be expected over all units in `per_steps` steps"
    )
    per_steps: int = Field(100_000, ge=1000, description="steps that `false_alarms` is about")


@dataclass(frozen=True)
class SlowUnit:
    """A host or rank that is slow."""

    name: str
    ratio: float  # its own time over that of its peers
    since_step: int  # about when that began
    step: int  # at which it was found


class SlowJudge:
    """Own times of one attempt.

    Args:
        work: for each of them what kind of work it does, such as its pipeline stage: only those of one kind are
            compared. Absent: all do the same.
    """

    def __init__(
        self, units: Sequence[str], work: Sequence[str] | None = None, config: SlowConfig | None = None
    ) -> None:
        self._config = config or SlowConfig()
        self._units = list(units)
        self._index = {name: index for index, name in enumerate(self._units)}
        kinds = list(work) if work is not None else [""] * len(self._units)
        groups = [np.array([i for i, other in enumerate(kinds) if other == kind]) for kind in dict.fromkeys(kinds)]
        self._peers = [members for members in groups if len(members) > 1]
        self.alone = [self._units[members[0]] for members in groups if len(members) == 1]
        """Units without a peer, that cannot be judged."""
        count = len(self._units)
        self._block: dict[int, Values] = {}
        self._signed: Values = np.full(count, np.nan)
        self._jumps: deque[Values] = deque(maxlen=_NOISE_BLOCKS)
        self._recent: deque[Values] = deque(maxlen=max(_MEAN_BLOCKS, self._config.min_blocks))
        self._sums: Values = np.zeros(count)
        self._runs: Values = np.zeros(count)
        self._named: set[int] = set()
        self._common: dict[int, int] = {}
        self._blocks = 0

    @property
    def named(self) -> list[str]:
        """Units that are slow at present."""
        return [self._units[index] for index in sorted(self._named)]

    @property
    def together(self) -> list[str]:
        """Units that are slow at present, but became so with so many others that the cause is common to them."""
        return [self._units[index] for index in sorted(self._common)]

    def observe(self, step: int, busy_s: Mapping[str, float]) -> list[SlowUnit]:
        """Take in own times of one step, of all units or of those that are known; returns those newly found slow.

        Steps may come in any order within a block; what is not positive or not finite, or of an unknown unit, is left
        out, and so is what comes after its block.
        """
        row = self._block.setdefault(step, np.full(len(self._units), np.nan))
        indices = np.fromiter((self._index.get(name, -1) for name in busy_s), np.intp, len(busy_s))
        seconds = np.fromiter(busy_s.values(), np.float64, len(busy_s))
        is_good = (indices >= 0) & np.isfinite(seconds) & (seconds > 0)
        row[indices[is_good]] = np.log(seconds[is_good])
        # The block has to span its steps, and most units have to have reported enough of them.
        wanted = self._config.block_steps
        if max(self._block) - min(self._block) < wanted - 1:
            return []
        known = (~np.isnan(np.array(list(self._block.values())))).sum(axis=0)
        if len(self._block) < wanted or np.median(known) < max(wanted // 2, 1):
            return []
        first, last = min(self._block), max(self._block)
        times = np.array([self._block[one] for one in sorted(self._block)])
        self._block = {}
        values, signed = np.full(len(self._units), np.nan), np.full(len(self._units), np.nan)
        for members in self._peers:
            enough = max(self._config.block_steps // 2, 1)
            values[members] = _values(times[:, members], enough)
            signed[members] = values[members] if len(members) >= _ENOUGH_UNITS else _signed(times[:, members], enough)
        return self._add(values, signed, first, last)

    def _add(self, values: Values, signed: Values, first: int, last: int) -> list[SlowUnit]:
        config, known = self._config, ~np.isnan(values)
        jumps = np.abs(signed - self._signed)
        self._jumps.append(jumps[~np.isnan(jumps)])
        self._signed = np.where(np.isnan(signed), self._signed, signed)
        self._recent.append(values)
        self._blocks += 1
        # From fewer differences the noise is not known.
        if len(self._jumps) < 3:
            return []
        reference = math.log(config.ratio) / 2
        noise = noise_of(list(self._jumps))
        # What one block may add has a limit, so that a short and heavy stall cannot stand for a lasting slowness; but
        # no smaller one than chance itself reaches, or what is far slower than a noisy job would need as long.
        most = max(2 * reference, _CHANCE_SD * noise)
        excess = np.clip(np.where(known, values, reference) - reference, -most, most)
        limit = limit_of(noise, len(self._units), config)
        # No higher than twice the limit, so that a unit that is well again is known to be so.
        self._sums = np.clip(self._sums + excess, 0.0, 2 * limit)
        self._runs = np.where(self._sums > 0, self._runs + known, 0)
        self._named = {index for index in self._named if self._sums[index] > 0}
        last_ones = np.array(list(self._recent)[-config.min_blocks :])
        steady = (last_ones > reference).sum(axis=0)
        rising = np.flatnonzero((self._sums > limit / 2) & (steady >= config.min_blocks - 2))
        # One that goes on when the others are well again is slow for itself, but not before that is certain.
        self._common = {index: until for index, until in self._common.items() if until > self._blocks}
        self._common |= dict.fromkeys(self._at_once(rising), self._blocks + config.min_blocks)
        over = np.flatnonzero((self._sums > limit) & (steady >= config.min_blocks - 1))
        free = [int(i) for i in over if int(i) not in self._named | self._common.keys() and self._sticks_out(int(i))]
        self._named |= set(free)
        found = []
        for index in free:
            blocks = int(self._runs[index])
            since = max(first - (blocks - 1) * (last - first + 1), 0)
            found.append(SlowUnit(self._units[index], math.exp(self._mean(blocks)[index]), since, last))
        return found

    def _at_once(self, rising: NDArray[np.intp]) -> set[int]:
        """Those of `rising` that began with too many others for each of them to have a cause of its own.

        What was there from the first blocks on began before, each at its time, and only very many of those count.
        """
        runs = self._runs[rising]
        is_old = runs >= self._blocks - 2
        beside = (np.abs(runs[:, None] - runs[None, :]) <= 1).sum(axis=1)
        most = np.where(is_old, max(_AT_ONCE, _OF_ALL_AT_ONCE * len(self._units)), _AT_ONCE)
        return {int(index) for index in rising[beside > most] if int(index) not in self._named}

    def _mean(self, blocks: int) -> Values:
        rows = np.array(list(self._recent)[-blocks:])
        counts = (~np.isnan(rows)).sum(axis=0)
        return np.where(counts > 0, np.nansum(rows, axis=0) / np.maximum(counts, 1), np.nan)

    def _sticks_out(self, index: int) -> bool:
        """Whether its mean is beyond what one of so many peers may reach by lasting differences between them."""
        peers = next(members for members in self._peers if index in members)
        if len(peers) < _ENOUGH_UNITS:
            return True
        means = self._mean(max(int(self._runs[index]), self._config.min_blocks))
        others = means[peers][~np.isnan(means[peers])]
        spread = max(_TO_SD * float(np.median(np.abs(others - np.median(others)))), _LEAST_NOISE)
        return bool(means[index] > NormalDist().inv_cdf(1 - 0.01 / len(peers)) * spread)


def noise_of(jumps: Sequence[Values]) -> float:
    """Standard deviation of a value by chance, from its changes from block to block."""
    changes = np.concatenate(jumps) if jumps else np.empty(0)
    median = float(np.median(changes)) if changes.size else 0.0
    return max(_INFLATION * _TO_SD * median / math.sqrt(2), _LEAST_NOISE)


def limit_of(noise: float, units: int, config: SlowConfig) -> float:
    """How far a sum may rise without a name.

    Without a slow unit the sum drifts down by at least a quarter of the logarithm of the ratio per block, which leaves
    as much for lasting differences between healthy units. With that drift, in standard deviations, the average run
    length until a false alarm at limit b (with the overshoot) is ``(exp(2 d b) - 1 - 2 d b) / (2 d^2)`` blocks, good
    to a factor of two here.
    """
    drift = math.log(config.ratio) / 4 / noise
    wanted = units * config.per_steps / config.block_steps / config.false_alarms
    height = 0.0
    # The height is on both sides of the formula; each round puts the last one in, which soon changes nothing.
    for _ in range(20):
        height = math.log1p(2 * drift * drift * wanted + 2 * drift * height) / (2 * drift)
    return max(height - _OVERSHOOT, 1.0) * noise


def _values(times: Values, enough: int) -> Values:
    """A unit's logarithm against its peers in one block, from logarithms of times: rows are steps, columns units."""
    counts = (~np.isnan(times)).sum(axis=1)
    common = times[counts * 2 >= times.shape[1]]
    # Where units report different steps there is no step to compare at, but the block as a whole is.
    against = common - _low_median(common, axis=1) if len(common) >= enough else times
    known = (~np.isnan(against)).sum(axis=0) >= max(enough // 2, 1)
    values = np.full(times.shape[1], np.nan)
    if known.any():
        values[known] = np.nanmedian(against[:, known], axis=0)
        values -= _low_median(values[None, :], axis=1)[0, 0]
    return values


def _signed(times: Values, enough: int) -> Values:
    """Of few units: each against the median of the others, which also shows by how much the fastest is faster."""
    values = np.full(times.shape[1], np.nan)
    for unit in range(times.shape[1]):
        against = times[:, unit] - _low_median(np.delete(times, unit, axis=1), axis=1)[:, 0]
        against = against[~np.isnan(against)]
        if len(against) >= enough:
            values[unit] = np.median(against)
    return values


def _low_median(values: Values, axis: int) -> Values:
    """Median that is one of the values, the lower of two in the middle: of two units the faster one is the measure."""
    ordered = np.sort(values, axis=axis)
    middle = (np.maximum((~np.isnan(values)).sum(axis=axis, keepdims=True), 1) - 1) // 2
    return np.take_along_axis(ordered, middle, axis=axis)
