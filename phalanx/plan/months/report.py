"""What is told of a story: what came of its runs, formulas beside, and what other choices would bring."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.core.errors import UserError
from phalanx.plan.months.best import (
    Choice,
    best_interval,
    best_spares,
    play_intervals,
    play_spares,
    with_interval,
    with_spares,
)
from phalanx.plan.months.closed import ClosedForm, away_ratio, closed_form, standby
from phalanx.plan.months.outcome import Outcome
from phalanx.plan.months.values import DAY_S, Story

_FACTORS = (0.25, 0.5, 2.0, 4.0)


@dataclass(frozen=True)
class Tried:
    """A choice by the closed form.

    Attributes:
        why: what speaks for it.
        value: seconds between checkpoints, or spares.
        ettr, goodput: with it.
        played: the same choice with the same failures as the story, where that was asked for.
    """

    why: str
    value: float
    ettr: float
    goodput: float
    played: Choice | None = None


@dataclass(frozen=True)
class MonthsReport:
    """All that is told of a story.

    Attributes:
        form: formulas, for failures without memory, in the long run.
        intervals, spares: choices, those of the story first.
        source: where the failures come from.
        is_recorded: they are recorded ones, or drawn from them with what came together.
    """

    outcome: Outcome
    form: ClosedForm
    intervals: tuple[Tried, ...]
    spares: tuple[Tried, ...]
    source: str
    is_recorded: bool = False

    @property
    def story(self) -> Story:
        """What was played."""
        return self.outcome.story


def make_report(outcome: Outcome, source: str, compare_runs: int = 0, *, is_recorded: bool = False) -> MonthsReport:
    """What is told of `outcome`.

    Args:
        source: of the failures, for people.
        compare_runs: of every other choice, to be played with the same failures; 0: formulas only.
    """
    story = outcome.story
    intervals, spares = list(_intervals(story)), list(_spares(story))
    if compare_runs:
        intervals = _with_neighbours(story, intervals)
        played = play_intervals(story, [tried.value for tried in intervals], compare_runs, outcome.seed)
        intervals = [_with(tried, choice) for tried, choice in zip(intervals, played, strict=True)]
        played = play_spares(story, [int(tried.value) for tried in spares], compare_runs, outcome.seed)
        spares = [_with(tried, choice) for tried, choice in zip(spares, played, strict=True)]
    return MonthsReport(outcome, closed_form(story), tuple(intervals), tuple(spares), source, is_recorded)


def _with(tried: Tried, choice: Choice) -> Tried:
    return Tried(tried.why, tried.value, tried.ettr, tried.goodput, choice)


def _interval(story: Story, why: str, interval_s: float) -> Tried:
    form = closed_form(with_interval(story, interval_s))
    return Tried(why, interval_s, form.ettr, form.ettr * story.work.hosts / (story.work.hosts + story.pool.spares))


def _possible(story: Story, interval_s: float) -> float:
    """The nearest interval that there can be."""
    least_s = max(story.checkpoints.persist_s, story.checkpoints.memory_interval_s, story.work.step_s)
    return min(max(interval_s, least_s), max(story.work.days * DAY_S, least_s))


def _intervals(story: Story) -> Iterator[Tried]:
    """The story's own, Young's, Daly's, and the best by the exact formula; intervals that can be."""
    form = closed_form(story)
    yield _interval(story, "this one", story.checkpoints.interval_s)
    for why, interval_s in (("Young 1974", form.young_s), ("Daly 2006", form.daly_s)):
        if math.isfinite(interval_s) and interval_s > 0 and _possible(story, interval_s) == interval_s:
            yield _interval(story, why, interval_s)
    yield _interval(story, "best", best_interval(story))


def _with_neighbours(story: Story, intervals: list[Tried]) -> list[Tried]:
    """Shorter and longer ones than the best, too."""
    best = intervals[-1].value
    others = [_possible(story, best * factor) for factor in _FACTORS]
    return [*intervals, *(_interval(story, f"best x {f:g}", s) for f, s in zip(_FACTORS, others, strict=True))]


def _spares(story: Story) -> Iterator[Tried]:
    almost_always = standby(story.all_hosts, away_ratio(story), 0.99)
    numbers = {"this many": story.pool.spares, "none": 0, "enough for 99 %": almost_always}
    try:
        best = best_spares(story)
    except UserError:  # no number is enough
        best = story.pool.spares
    else:
        numbers |= {"half of the best": best // 2, "best": best, "twice the best": 2 * best}
    seen = set()
    for why, number in numbers.items():
        if number not in seen or why == "best":
            form = closed_form(with_spares(story, number))
            yield Tried(why, number, form.ettr, form.ettr * story.work.hosts / (story.work.hosts + number))
            seen.add(number)
