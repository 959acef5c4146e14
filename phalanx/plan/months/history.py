"""Histories of failures, one for each run: drawn at random from rates, before anything is decided.

What happens to a host does not depend on what the job does with it, so one history serves every choice of intervals and
spares: differences between them are theirs, not of luck (common random numbers). A host that is out cannot fail; one
that only waits may fail less often (`luck` against `Failures.idle_ratio`).

Usual failures hit all hosts alike; lemons have more on top of these (`is_extra`), which end when one is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.months.values import DAY_S, Duration, Failures, Recovery, Story

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

PLANNED = -1
"""The host, and the class, of a planned interruption."""


@dataclass(frozen=True)
class History:
    """What happens in each run: arrays of runs x events, in the order of time, the rest at infinity.

    Attributes:
        classes: numbers of failure classes, or `PLANNED`.
        repairs_s: how long the host is away; of a planned interruption, how long it takes.
        stretch: how long this recovery takes, over the usual, ratio.
        luck: even from 0 to 1.
        is_extra: it only happens because the host is a lemon.
        is_fixed: failures end at a set time whatever is done about them, and add up (a trace); else the repair begins
            when the host is taken out, and a host that is out has no others.
    """

    times_s: Floats
    hosts: Ints
    classes: Ints
    repairs_s: Floats
    stretch: Floats
    luck: Floats
    is_extra: Flags
    is_fixed: bool = False

    @property
    def runs(self) -> int:
        """How many."""
        return len(self.times_s)


def draw_duration(duration: Duration, random: np.random.Generator, count: int) -> Floats:
    """That many of them, seconds."""
    if duration.kind == "fixed":
        return np.full(count, duration.mean_s)
    if duration.kind == "exponential":
        return random.exponential(duration.mean_s, count)
    if duration.kind == "lognormal":
        return random.lognormal(np.log(duration.median_s), duration.sigma, count)
    return random.choice(np.asarray(duration.values_s), count)


def draw_stretch(spread: float, random: np.random.Generator, count: int) -> Floats:
    """Lognormal with mean 1 and that standard deviation."""
    if spread == 0:
        return np.ones(count)
    sigma = np.sqrt(np.log1p(spread**2))
    return random.lognormal(-(sigma**2) / 2, sigma, count)


def draw_lemons(share: float, runs: int, hosts: int, random: np.random.Generator) -> Flags:
    """Which hosts are lemons: runs x hosts."""
    return random.random((runs, hosts)) < share if share else np.zeros((runs, hosts), dtype=bool)


def draw(story: Story, lemons: Flags, begins_s: float, ends_s: float, random: np.random.Generator) -> History:
    """Everything that happens from `begins_s` to `ends_s`, in as many runs and hosts as `lemons` has."""
    runs, hosts = lemons.shape
    days = (ends_s - begins_s) / DAY_S
    usual, extra, planned, rest = random.spawn(4)
    rate = story.failures.per_host_day() * story.failures.usual_ratio * days
    usual_counts: Ints = usual.poisson(rate * hosts, (runs,))
    more = np.asarray(rate * (story.failures.lemon_times - 1) * lemons.sum(axis=1), dtype=np.float64)
    extra_counts: Ints = extra.poisson(more, (runs,))
    planned_counts: Ints = planned.poisson(story.recovery.planned_per_day * days, (runs,))
    events = [
        _hits(usual_counts, usual.integers(0, hosts, usual_counts.sum()), False),
        _hits(extra_counts, _lemons_hit(lemons, extra_counts, extra), True),
        _hits(planned_counts, np.full(planned_counts.sum(), PLANNED), False),
    ]
    runs_hit, hosts_hit, are_extra = (np.concatenate(column) for column in zip(*events, strict=True))
    return _arranged(story, runs, runs_hit, hosts_hit, are_extra, (begins_s, ends_s), rest)


def _hits(counts: Ints, hosts: Ints, is_extra: bool) -> tuple[Ints, Ints, Flags]:
    runs = np.repeat(np.arange(len(counts)), counts)
    return runs, hosts, np.full(len(runs), is_extra)


def _lemons_hit(lemons: Flags, counts: Ints, random: np.random.Generator) -> Ints:
    """For each extra failure a lemon of its run, any of them."""
    numbers = lemons.sum(axis=1)
    by_run, which = np.nonzero(lemons)
    first = np.searchsorted(by_run, np.arange(len(lemons)))
    runs = np.repeat(np.arange(len(counts)), counts)
    chosen = (random.random(len(runs)) * numbers[runs]).astype(np.int64)
    hit: Ints = which[first[runs] + chosen].astype(np.int64)
    return hit


def _arranged(
    story: Story,
    runs: int,
    runs_hit: Ints,
    hosts_hit: Ints,
    are_extra: Flags,
    between_s: tuple[float, float],
    random: np.random.Generator,
) -> History:
    """Give each event a time, a class and all else, and sort them."""
    count = len(runs_hit)
    times_s, classes, repairs, stretch, luck = random.spawn(5)
    when_s = times_s.uniform(*between_s, count)
    is_planned = hosts_hit == PLANNED
    kinds = np.where(is_planned, PLANNED, _classes(story.failures, classes, count))
    return laid_out(
        runs,
        runs_hit,
        History(
            when_s,
            hosts_hit,
            kinds,
            _repairs(story.failures, story.recovery, kinds, repairs),
            draw_stretch(story.recovery.spread, stretch, count),
            luck.random(count),
            are_extra,
        ),
    )


def laid_out(runs: int, runs_hit: Ints, flat: History) -> History:
    """A history whose arrays are one long row of events, as runs x events in the order of time."""
    order = np.lexsort((flat.times_s, runs_hit))
    sorted_runs = runs_hit[order]
    counts = np.bincount(sorted_runs, minlength=runs)
    column = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    width = int(counts.max(initial=0)) + 1  # one more, so that there is always a next one: never

    def table(values: NDArray, empty: float) -> NDArray:
        filled = np.full((runs, width), empty, dtype=values.dtype)
        filled[sorted_runs, column] = values[order]
        return filled

    return History(
        table(flat.times_s, np.inf),
        table(flat.hosts, PLANNED),
        table(flat.classes, PLANNED),
        table(flat.repairs_s, 0),
        table(flat.stretch, 1),
        table(flat.luck, 0),
        table(flat.is_extra, False),
        flat.is_fixed,
    )


def _classes(failures: Failures, random: np.random.Generator, count: int) -> Ints:
    rates = np.array([c.per_host_day for c in failures.classes] or [1.0])
    shares = np.cumsum(rates) / max(rates.sum(), 1e-300)
    return np.minimum(np.searchsorted(shares, random.random(count), side="right"), len(rates) - 1)


def _repairs(failures: Failures, recovery: Recovery, kinds: Ints, random: np.random.Generator) -> Floats:
    repairs_s = np.full(len(kinds), recovery.planned_s)
    for number, failure in enumerate(failures.classes):
        ours = kinds == number
        repairs_s[ours] = draw_duration(failure.repair, random, int(ours.sum()))
    return repairs_s
