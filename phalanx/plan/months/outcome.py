"""What came of many runs: means with their confidence, and how far single runs spread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.months.state import COUNTS, DONE, PARTS, TRAINING, State
from phalanx.plan.months.values import DAY_S, HOUR_S, Story

Floats = NDArray[np.float64]
_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A figure over all runs.

    Attributes:
        mean: of all runs.
        low, high: in which the true mean lies with 95 % confidence.
        least, median, most: 2.5 %, half and 97.5 % of the runs have no more than this: where one single run lies.
    """

    mean: float
    low: float
    high: float
    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Floats) -> Estimate:
        """Of one value for each run."""
        if not np.isfinite(values).all():
            least, median, most = np.quantile(values, (0.025, 0.5, 0.975), method="nearest").tolist()
            return cls(math.inf, math.inf, math.inf, least, median, most)
        mean = float(values.mean())
        half = _Z95 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
        least, median, most = np.quantile(values, (0.025, 0.5, 0.975)).tolist()
        return cls(mean, mean - half, mean + half, least, median, most)


@dataclass(frozen=True)
class Runs:
    """What became of each run, in arrays.

    Attributes:
        parts_s: runs x `PARTS`; they sum to `wall_s`.
        counts: runs x `COUNTS`.
        finished: all the work was done.
        most_out: hosts that were away at once at most.
    """

    wall_s: Floats
    parts_s: Floats
    counts: NDArray[np.int64]
    finished: NDArray[np.bool_]
    most_out: NDArray[np.int64]

    @classmethod
    def of(cls, state: State) -> Runs:
        """What they have come to by now."""
        return cls(state.now_s, state.parts_s, state.counts, state.phase == DONE, state.most_out)

    @classmethod
    def joined(cls, parts: list[Runs]) -> Runs:
        """All of them."""
        names = ("wall_s", "parts_s", "counts", "finished", "most_out")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @property
    def ettr(self) -> Floats:
        """Effective training time ratio of each run."""
        return self.parts_s[:, TRAINING] / np.maximum(self.wall_s, 1e-300)


@dataclass(frozen=True)
class Outcome:
    """What is to be expected.

    Attributes:
        ettr: effective training time ratio: training that counts, over all time.
        goodput: that times the share of all hosts, spares too, that the job uses.
        days: that a run takes; with a goal, until it is reached (infinite: it was not).
        device_hours: of all hosts, spares too, cold ones not.
        cost: of these, in the money of `Work.price_per_device_hour`.
        steps: that count.
        shares: where the time goes, of all of it; they sum to 1.
        counts: what happened in a run.
        finished: runs that reached the goal, ratio; 0 where there is none.
        most_out: hosts that were away at once at most.
        samples: the runs themselves.
    """

    story: Story
    seed: int
    ettr: Estimate
    goodput: Estimate
    days: Estimate
    device_hours: Estimate
    cost: Estimate
    steps: Estimate
    shares: Mapping[str, Estimate]
    counts: Mapping[str, Estimate]
    finished: float
    most_out: Estimate
    samples: Runs


def summarise(story: Story, seed: int, runs: Runs) -> Outcome:
    """The figures of these runs."""
    work = story.work
    paid_hosts = work.hosts + story.pool.spares
    device_hours = runs.wall_s / HOUR_S * paid_hosts * work.devices_per_host
    days = runs.wall_s / DAY_S
    if work.steps:
        days = np.where(runs.finished, days, np.inf)
    wall_s = np.maximum(runs.wall_s, 1e-300)
    return Outcome(
        story=story,
        seed=seed,
        ettr=Estimate.of(runs.ettr),
        goodput=Estimate.of(runs.ettr * work.hosts / paid_hosts),
        days=Estimate.of(days),
        device_hours=Estimate.of(device_hours),
        cost=Estimate.of(device_hours * work.price_per_device_hour),
        steps=Estimate.of(runs.parts_s[:, TRAINING] / work.step_s),
        shares={part: Estimate.of(runs.parts_s[:, n] / wall_s) for n, part in enumerate(PARTS)},
        counts={name: Estimate.of(runs.counts[:, n].astype(float)) for n, name in enumerate(COUNTS)},
        finished=float(runs.finished.mean()),
        most_out=Estimate.of(runs.most_out.astype(float)),
        samples=runs,
    )
