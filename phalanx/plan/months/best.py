"""The best interval between checkpoints and the best number of spares: by formula, and with the same failures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.core.errors import UserError
from phalanx.plan.months.closed import away_ratio, capacity_of, closed_form, durable_mtbf_s
from phalanx.plan.months.outcome import Estimate, Outcome
from phalanx.plan.months.simulate import simulate
from phalanx.plan.months.values import DAY_S, Story, require

_MOST_SPARES = 4096


@dataclass(frozen=True)
class Choice:
    """One of the values that were tried.

    Attributes:
        value: seconds between checkpoints, or spares.
        gain: how much more of what is wanted it brings than the value that the story had, in the same runs.
    """

    value: float
    outcome: Outcome
    gain: Estimate


def with_interval(story: Story, interval_s: float) -> Story:
    """The same story with another interval between durable checkpoints."""
    return replace(story, checkpoints=replace(story.checkpoints, interval_s=interval_s))


def with_spares(story: Story, spares: int) -> Story:
    """The same story with another number of spares."""
    return replace(story, pool=replace(story.pool, spares=spares))


def best_interval(story: Story) -> float:
    """The interval, whole steps, with which the closed form has the highest ETTR.

    No shorter than persisting takes, nor than snapshots in memory are apart; no longer than all of the time.
    """
    step_s, checkpoints = story.work.step_s, story.checkpoints
    least = max(math.ceil(max(checkpoints.persist_s, checkpoints.memory_interval_s) / step_s - 1e-9), 1)
    # Much longer than that, next to nothing is left, and roundings would decide.
    longest_s = min(story.work.days * DAY_S, 10 * durable_mtbf_s(story))
    most = max(int(longest_s / step_s), least)

    def lost(steps: int) -> float:
        return -closed_form(with_interval(story, steps * step_s)).running

    return _lowest(lost, least, most) * step_s


def _lowest(cost: Callable[[int], float], low: int, high: int) -> int:
    """Where `cost`, which falls and then rises, is lowest; where it does not rise, the highest number."""
    if cost(high) <= cost(max(high - 1, low)) and cost(high) <= cost(low):
        return high
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if cost(left) <= cost(right):
            high = right
        else:
            low = left
    return min(range(low, high + 1), key=cost)


def best_spares(story: Story) -> int:
    """The number of spares with the highest goodput by the closed form: training, over all hosts that are paid.

    Raises:
        UserError: so many hosts are away that no number is enough.
    """
    hosts, first = story.work.hosts, _first_to_try(story)
    best, highest, without_gain = first, -1.0, 0
    for spares in range(first, _MOST_SPARES + 1):
        capacity, _ = capacity_of(with_spares(story, spares))
        goodput = capacity * hosts / (hosts + spares)
        if goodput > highest:
            best, highest, without_gain = spares, goodput, 0
        without_gain += 1
        # Beyond these nothing can be gained any more.
        if capacity > 1 - 1e-6 or (without_gain > 64 and highest > 0.01):
            break
    return best


def _first_to_try(story: Story) -> int:
    """Fewer spares than that are never enough for a job that waits for all of its hosts."""
    if story.pool.when_missing == "shrink":
        return 0
    away = away_ratio(story)
    needed = story.work.hosts * away / max(1 - away, 1e-9)
    if needed > _MOST_SPARES:
        cure = f"look at rates and repairs, or give a number of spares up to {_MOST_SPARES}"
        raise UserError(f"{away:.1%} of all hosts are away on average", cure=cure, field="spares", value="best")
    return max(int(needed - 8 * math.sqrt(needed + 1)) - story.pool.cold, 0)


def play_intervals(story: Story, intervals_s: Sequence[float], runs: int = 200, seed: int = 0) -> list[Choice]:
    """Each interval with the same failures; `gain` is in ETTR."""
    stories = [(interval_s, with_interval(story, interval_s)) for interval_s in intervals_s]
    return _play(story, stories, runs, seed, lambda outcome: outcome.samples.ettr)


def play_spares(story: Story, numbers: Sequence[int], runs: int = 200, seed: int = 0) -> list[Choice]:
    """Each number of spares with the same failures; `gain` is in goodput."""
    for number in numbers:
        require("spares", number, 0, _MOST_SPARES)

    def goodput(outcome: Outcome) -> np.ndarray:
        work = outcome.story.work
        return np.asarray(outcome.samples.ettr * work.hosts / (work.hosts + outcome.story.pool.spares))

    return _play(story, [(number, with_spares(story, number)) for number in numbers], runs, seed, goodput)


def _play(
    story: Story,
    stories: Sequence[tuple[float, Story]],
    runs: int,
    seed: int,
    wanted: Callable[[Outcome], np.ndarray],
) -> list[Choice]:
    if not stories:
        raise UserError("there is nothing to try", cure="give one value at least", field="values")
    drawn = max(other.all_hosts for other in (story, *(other for _, other in stories)))
    now = wanted(simulate(story, runs, seed, drawn))
    outcomes = [(value, simulate(other, runs, seed, drawn)) for value, other in stories]
    return [Choice(value, outcome, Estimate.of(wanted(outcome) - now)) for value, outcome in outcomes]
