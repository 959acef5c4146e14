"""How far predictions are off on tables that were left out, and what is learnt from the others.

One number is learnt, `Residual.kernels`, and the width of the interval around a prediction. Both are judged on rows
that had no part in them: of one table at a time, then of one publication at a time, as tables of one publication share
their program and their machines. Learnt from, and judged on, are the tables that were collected when the planner was
done; those that it was made beside (`assumptions.SETTINGS`) flatter it.

Every publication counts the same, within it every table, and within a table every row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.predict import predict
from phalanx.plan.types import INTERVAL_SHARE, Job, Recompute, Residual, Strategy
from phalanx.plan.validate.assumptions import LATER, Setting
from phalanx.plan.validate.published import TABLES, Row, cluster_of, job_of, published_flops, read_table, strategy_of

Array = NDArray[np.float64]

_KERNELS = (1.0, 2.0, 3.0, 4.0, 6.0)
"""Values of `Residual.kernels` at which every row is predicted; between them logarithms of seconds go straight."""
_GRID = np.exp(np.linspace(0.0, np.log(_KERNELS[-1]), 301))
_AGAIN: Mapping[Recompute, float] = {"full": 1 / 3, "alternate": 1 / 9}
"""Products made again, over those that count, roughly; other kinds make none."""


@dataclass(frozen=True, eq=False)
class JudgedRows:
    """All rows of some tables."""

    # Of each row.
    table: NDArray[np.str_]
    publication: NDArray[np.str_]
    measured_s: Array
    predicted_s: Array  # of each row, for each of `_KERNELS`
    named_s: Array  # likewise, as a user says it (`Setting.as_named`)
    peak_s: Array  # FLOPs as publications count them over the peak of all devices
    again: Array  # FLOPs with what is made again, over those

    def log_error(self, kernels: float, *, named: bool = False) -> Array:
        """Logarithm of measured over predicted seconds of every row. `named`: as a user says it."""
        at = np.log(_KERNELS)
        place = int(np.clip(np.searchsorted(at, np.log(kernels)) - 1, 0, len(at) - 2))
        part = (np.log(kernels) - at[place]) / (at[place + 1] - at[place])
        logs = np.log(self.named_s if named else self.predicted_s)
        found: Array = np.log(self.measured_s) - logs[place] * (1 - part) - logs[place + 1] * part
        return found

    @cached_property
    def squares(self) -> Array:
        """Squares of `log_error` of every row, for each of `_GRID`."""
        return np.stack([self.log_error(kernels) for kernels in _GRID]) ** 2

    def weights(self, among: NDArray[np.bool_]) -> Array:
        """Of every row; 0 of those that are not `among` what counts."""
        weights = np.zeros(len(self.table))
        publications = np.unique(self.publication[among])
        for publication in publications:
            own = among & (self.publication == publication)
            tables = np.unique(self.table[own])
            for table in tables:
                rows = own & (self.table == table)
                weights[rows] = 1 / (len(publications) * len(tables) * np.count_nonzero(rows))
        return weights


@dataclass(frozen=True)
class Judged:
    """A table that was left out."""

    table: str
    title: str
    rows: int
    plain: float  # mean absolute error of the model alone
    constant: float  # of one share of the peak learnt from the other tables, FLOPs as published
    constant_again: float  # likewise, with what is computed again counted
    learnt: float  # with `Residual.kernels` learnt from the other tables
    signed: float  # mean error of that, with its sign
    alone: float  # with it learnt from the other publications
    inside: float  # share of rows in the interval that the other tables give
    inside_alone: float  # in that of the other publications


def rows_of(settings: Sequence[Setting] = LATER, folder: Path = TABLES) -> JudgedRows:
    """Every row of some tables, predicted for every value of `Residual.kernels`."""
    pairs = [(setting, row) for setting in settings for row in read_table(folder / f"{setting.table}.csv")]
    cases = [_case(setting, row) for setting, row in pairs]
    peak = [
        published_flops(job) / float(strategy.world_size * machine.device.peak_flops_per_s(job.precision))
        for job, strategy, machine in cases
    ]
    return JudgedRows(
        table=np.array([setting.table for setting, _ in pairs]),
        publication=np.array([setting.publication for setting, _ in pairs]),
        measured_s=np.array([row.step_s for _, row in pairs]),
        predicted_s=_predicted_s(cases),
        named_s=_predicted_s([_case(setting.as_named(), row) for setting, row in pairs]),
        peak_s=np.array(peak),
        again=np.array([1 + _AGAIN.get(strategy.recompute, 0.0) for job, strategy, _ in cases]),
    )


_Case: TypeAlias = tuple[Job, Strategy, Cluster]


def _case(setting: Setting, row: Row) -> _Case:
    return job_of(row, setting), strategy_of(row, setting), cluster_of(row, setting)


def _predicted_s(cases: Sequence[_Case]) -> Array:
    return np.array(
        [
            [
                predict(replace(job, residual=Residual(kernels)), strategy, machine).step_s
                for job, strategy, machine in cases
            ]
            for kernels in _KERNELS
        ]
    )


_STUDENT = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397)
"""What 80 % of draws of Student's t lie within, by degrees of freedom from 1."""


def learn(rows: JudgedRows, among: NDArray[np.bool_] | None = None) -> Residual:
    """What the rows `among` all say: the number for which logarithms of errors are least squares, and its interval.

    The interval is that of one more publication whose errors are as those of these, each left out in turn, and each
    predicted as a user says it: Student's t on the root of their mean square, every publication counting the same.
    """
    among = np.ones(len(rows.table), bool) if among is None else among
    publications = np.unique(rows.publication[among])
    squares = []
    for publication in publications:
        left = among & (rows.publication == publication)
        errors = rows.log_error(_kernels(rows, among & ~left), named=True)[left]
        squares.append(float((errors**2).mean()))
    count = len(publications)
    width = _STUDENT[count - 2] * np.sqrt((1 + 1 / count) * np.mean(squares))
    return Residual(_kernels(rows, among), spread=float(width))


def own_spread(rows: JudgedRows) -> float:
    """How far steps lie around the middle of the others of their publication: logarithm, 80 % of them."""
    everything = np.ones(len(rows.table), bool)
    errors, own = rows.log_error(_kernels(rows, everything)), np.zeros(len(rows.table))
    for publication in np.unique(rows.publication):
        places = np.flatnonzero(rows.publication == publication)
        for place in places:
            own[place] = errors[place] - np.median(errors[places[places != place]])
    return _quantile(np.abs(own), rows.weights(everything), INTERVAL_SHARE)


def judge(rows: JudgedRows, settings: Sequence[Setting] = LATER) -> list[Judged]:
    """Every table, left out."""
    return [_judged(rows, setting) for setting in settings]


def _judged(rows: JudgedRows, setting: Setting) -> Judged:
    own = rows.table == setting.table
    others = ~own
    apart = rows.publication != setting.publication
    with_table, with_publication = learn(rows, others), learn(rows, apart)
    left, alone = rows.log_error(with_table.kernels)[own], rows.log_error(with_publication.kernels)[own]
    named = [np.abs(rows.log_error(each.kernels, named=True)[own]) for each in (with_table, with_publication)]
    return Judged(
        table=setting.table,
        title=setting.title,
        rows=int(np.count_nonzero(own)),
        plain=_mean(rows.log_error(1.0)[own]),
        constant=_constant(rows, own, rows.peak_s),
        constant_again=_constant(rows, own, rows.peak_s * rows.again),
        learnt=_mean(left),
        signed=float((np.exp(-left) - 1).mean()),
        alone=_mean(alone),
        inside=float((named[0] <= with_table.spread).mean()),
        inside_alone=float((named[1] <= with_publication.spread).mean()),
    )


def _kernels(rows: JudgedRows, among: NDArray[np.bool_]) -> float:
    return float(_GRID[int((rows.squares @ rows.weights(among)).argmin())])


def _constant(rows: JudgedRows, own: NDArray[np.bool_], peak_s: Array) -> float:
    """Mean absolute error of `own` rows by one share of the peak, the mean over the other tables."""
    share = peak_s / rows.measured_s
    tables = np.unique(rows.table[~own])
    constant = np.mean([share[rows.table == table].mean() for table in tables])
    return float(np.abs(share[own] / constant - 1).mean())


def _mean(log_errors: Array) -> float:
    return float(np.abs(np.exp(-log_errors) - 1).mean())


def _quantile(values: Array, weights: Array, level: float) -> float:
    """The value below which that share of the weight lies."""
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(below, level)), len(values) - 1)])
