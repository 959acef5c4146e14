"""What an incident looks like: which metrics changed and how, of what class it may be, and how sure one can be.

Minder itself names a machine and no cause. The guess is a multinomial regression on labelled cases of the develop
split; most crashes look alike whatever ended the process, so that it gives shares, not an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.detect.minder.minder_weights import ClassNumbers, ConfidenceNumbers
from phalanx.detect.minder.online_minder import FaultyMachines
from phalanx.detect.monitoring.metric_catalogue import CATALOGUE
from phalanx.detect.monitoring.metric_table import MetricTable

_BEFORE_S, _AFTER_S = 120.0, 20.0
"""How much before the onset shows what the machine was like, and from when on after it the fault has developed."""

UNCALIBRATED = 0.8
"""Confidence where none was fitted: no measure of the single incident."""

_LEAST_SCORE, _MOST_AGREEING = 0.2, 3
"""In thresholds; and metrics besides the first, of which more say nothing new."""

_SMALL = 0.01
"""A change, in limits of the metric, that is small."""


@dataclass(frozen=True)
class MetricChange:
    """How one metric of a machine changed against its peers.

    Attributes:
        metric: its name.
        value: median since then; NaN: it vanished.
        of_peers: median of the others since then.
        change: of the machine less that of the peers, in limits of the metric (0 to 1 wide).
        of_job: change of the peers, in the same.
    """

    metric: str
    value: float
    of_peers: float
    change: float
    of_job: float


def changes_of(table: MetricTable, machine: int, since: int, at: int) -> tuple[MetricChange, ...]:
    """Of all metrics of the table, which is in the units of the catalogue; the largest changes first."""
    first = max(0, since - round(_BEFORE_S / table.period_s))
    begun = min(since + round(_AFTER_S / table.period_s), at)
    others = np.arange(len(table.machines)) != machine
    found = []
    for metric, values in zip(table.metrics, table.values, strict=True):
        known = CATALOGUE[metric]
        width = known.upper - known.lower
        own = (_median(values[machine, first : max(since, first + 1)]), _median(values[machine, begun : at + 1]))
        peers = (
            _median(values[others, first : max(since, first + 1)]), _median(values[others, begun : at + 1])
        )  # fmt: skip
        of_job = (peers[1] - peers[0]) / width
        change = (own[1] - own[0]) / width - of_job
        found.append(MetricChange(metric, own[1], peers[1], change, of_job))
    return tuple(sorted(found, key=lambda one: -abs(one.change) if math.isfinite(one.change) else 0.0))


def class_features(
    metrics: Sequence[str], changes: Sequence[MetricChange], vanished: Sequence[str]
) -> NDArray[np.float64]:
    """What classes are told apart by: signed logarithms of changes, those of the job, and what vanished."""
    by_name = {one.metric: one for one in changes}
    found: list[float] = []
    for metric in metrics:
        one = by_name.get(metric)
        for change in (one.change, one.of_job) if one else (0.0, 0.0):
            change = change if math.isfinite(change) else 0.0
            found.append(math.copysign(math.log1p(abs(change) / _SMALL), change))
    of_gpus = [name for name in vanished if CATALOGUE[name].is_of_gpus]
    return np.array([*found, 4.0 * bool(of_gpus), 4.0 * (len(of_gpus) < len(vanished))])


def guess_class(numbers: ClassNumbers, features: NDArray[np.float64]) -> tuple[tuple[str, float], ...]:
    """Classes of faults and their shares among cases that look like this, the largest first."""
    odds = np.array(numbers.weights) @ features + np.array(numbers.constants)
    shares = np.exp(odds - odds.max())
    shares /= shares.sum()
    return tuple((numbers.names[one], float(shares[one])) for one in np.argsort(-shares))


def confidence_features(found: FaultyMachines, machines: int) -> NDArray[np.float64]:
    """What an incident is trusted by."""
    return np.array(
        [
            math.log(max(found.score, _LEAST_SCORE)) if found.metric else 0.0,
            found.share,
            float(min(len(found.agreeing), _MOST_AGREEING)),
            float(bool(found.vanished)),
            float(len(found.affected) > 0),
            math.log(machines),
        ]
    )


def confidence_of(numbers: ConfidenceNumbers | None, features: NDArray[np.float64]) -> float:
    """Share of incidents like it that were right; never quite 0 or 1."""
    if numbers is None:
        return UNCALIBRATED
    odds = numbers.constant + float(np.dot(numbers.weights, features))
    return float(np.clip(1 / (1 + math.exp(-np.clip(odds, -30, 30))), 0.02, 0.99))


def _median(values: NDArray[np.float32]) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else math.nan
