"""Predicted against published: errors by row, and what the open choices change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.hardware.load import load_cluster
from phalanx.plan.predict import predict
from phalanx.plan.types import Prediction
from phalanx.plan.validate.assumptions import ALTERNATIVES, SETTINGS, Setting
from phalanx.plan.validate.jobs import cluster_of, job_of, strategy_of
from phalanx.plan.validate.later import ALTERNATIVES_LATER, LATER
from phalanx.plan.validate.null import ideal_s, leave_one_out
from phalanx.plan.validate.rows import TABLES, Row, read_table


@dataclass(frozen=True)
class Compared:
    """A row and its prediction."""

    row: Row
    prediction: Prediction

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.prediction.step_s / self.row.step_s - 1


@dataclass(frozen=True, eq=False)
class TableResult:
    """A table's comparison.

    Attributes:
        null_errors: of the null model, each row left out in turn; empty where there are too few rows.
        spread: mean absolute error with each open choice made otherwise, by what was changed.
    """

    setting: Setting
    compared: tuple[Compared, ...]
    null_errors: NDArray[np.float64]
    spread: Mapping[str, float]

    @property
    def errors(self) -> NDArray[np.float64]:
        """Signed errors by row."""
        return np.array([one.error for one in self.compared])

    @property
    def mean_error(self) -> float:
        """Mean of absolute errors."""
        return float(np.abs(self.errors).mean())


def compare(setting: Setting, folder: Path = TABLES, with_spread: bool = True) -> TableResult:
    """Predict all rows of a table.

    Raises:
        UserError: the table is not there, or cannot be read.
    """
    rows = read_table(folder / f"{setting.table}.csv")
    compared = tuple(_compared(row, setting) for row in rows)
    peak = load_cluster(setting.cluster, 1).device.peak_flops_per_s(setting.precision)
    ideal = [ideal_s(one.prediction.job, one.prediction.strategy, peak) for one in compared]
    null = leave_one_out(ideal, [row.step_s for row in rows])
    return TableResult(setting, compared, null, _spread(setting, rows) if with_spread else {})


def compare_all(folder: Path = TABLES, with_spread: bool = True) -> list[TableResult]:
    """All tables of `folder` that have a setting."""
    found = [setting for setting in (*SETTINGS, *LATER) if (folder / f"{setting.table}.csv").is_file()]
    return [compare(setting, folder, with_spread) for setting in found]


def _compared(row: Row, setting: Setting) -> Compared:
    return Compared(row, predict(job_of(row, setting), strategy_of(row, setting), cluster_of(row, setting)))


def _spread(setting: Setting, rows: list[Row]) -> dict[str, float]:
    """Mean absolute error with one choice at a time made otherwise."""
    found = {}
    for name, values in {**ALTERNATIVES, **ALTERNATIVES_LATER}.get(setting.table, {}).items():
        for value in values:
            otherwise: dict[str, Any] = {name: value}
            changed = replace(setting, **otherwise)
            errors = [abs(_compared(row, changed).error) for row in rows]
            found[f"{name} = {getattr(value, 'name', value)}"] = float(np.mean(errors))
    return found
