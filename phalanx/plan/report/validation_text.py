"""Predictions held against published measurements, for a person at a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.plan.report.text import make_columns, title, wrapped
from phalanx.plan.validate.ablation import Change
from phalanx.plan.validate.compare import TableResult

_MOST_ROWS = 12


def validation_text(
    results: Sequence[TableResult], changes: Sequence[Change], *, width: int = 80, all_rows: bool = False
) -> RenderableType:
    """Every table with its rows, then all tables in short, then the ablation.

    Args:
        all_rows: of long tables all rows, not the worst alone.
    """
    pieces: list[RenderableType] = []
    for result in results:
        pieces += [title(result.setting.title), *_rows(result, all_rows)]
        pieces += [*(Text(wrapped(line, width, "  "), "dim") for line in assumed_lines(result)), ""]
    pieces += [title("all tables; the null model is fitted to all rows of a table but the one that it predicts")]
    pieces += [_summary(results)]
    if changes:
        pieces += ["", title("MegaScale, table 3: points of MFU after each change"), _ablation(changes)]
    return Group(*pieces)


def validation_json(results: Sequence[TableResult], changes: Sequence[Change]) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "version": 1,
        "tables": [_table_json(result) for result in results],
        "ablation": list(map(_change_json, changes)),
    }


def places_shown(result: TableResult, all_rows: bool) -> list[int]:
    """Which rows of a table are told, in its order: of a long one the worst."""
    every = range(len(result.compared))
    if len(every) <= _MOST_ROWS or all_rows:
        return list(every)
    return sorted(sorted(every, key=lambda place: -abs(result.errors[place]))[:_MOST_ROWS])


def row_cells(result: TableResult, place: int) -> tuple[str, ...]:
    """A row: its name, devices, batch, measured and predicted seconds, error, the null model's error."""
    one = result.compared[place]
    null = percent(result.null_errors[place]) if len(result.null_errors) else "-"
    numbers = (f"{one.row.devices:,}", f"{one.row.global_batch:,}", f"{one.row.step_s:.3f}")
    return (one.row.row_id, *numbers, f"{one.prediction.step_s:.3f}", percent(one.error), null)


def assumed_lines(result: TableResult) -> list[str]:
    """What is assumed, and what else it could be comes to."""
    lines = [f"assumed: {name}: {why}" for name, why in result.setting.assumed.items()]
    if result.spread:
        others = ", ".join(f"{name}: {100 * error:.1f} %" for name, error in result.spread.items())
        lines.append(f"mean error {100 * result.mean_error:.1f} %; with other choices: {others}")
    return lines


def mean_and_most(errors: NDArray[np.float64]) -> tuple[str, str]:
    """Mean and largest size of some errors."""
    if not len(errors):
        return "-", "-"
    sizes = np.abs(errors)
    return f"{100 * sizes.mean():.2f} %", f"{100 * sizes.max():.1f} %"


def ablation_cells(change: Change, *, is_first: bool) -> tuple[str, str, str, str]:
    """Predicted and published points with what each gains; the first is what the others change."""
    gains = ("", "") if is_first else (f"{change.gain:+.1f}", f"{change.published_gain:+.1f}")
    return f"{change.predicted:.1f}", gains[0], f"{change.published:.1f}", gains[1]


def _rows(result: TableResult, all_rows: bool) -> list[RenderableType]:
    """A line for each row; of long tables the worst."""
    shown = places_shown(result, all_rows)
    numbers = ("devices", "batch", "measured s", "predicted s", "error", "null model")
    table = make_columns(("row", "left"), *((name, "right") for name in numbers))
    for place in shown:
        table.add_row(*row_cells(result, place))
    left_out = len(result.compared) - len(shown)
    return [table, *([Text(f"and {left_out} rows that are nearer (--rows shows all)", "dim")] if left_out else [])]


def _summary(results: Iterable[TableResult]) -> Table:
    names = ("rows", "mean", "max", "null mean", "null max")
    table = make_columns(("table", "left"), *((name, "right") for name in names))
    for result in results:
        cells = [*mean_and_most(result.errors), *mean_and_most(result.null_errors)]
        table.add_row(result.setting.title, str(len(result.compared)), *cells)
    return table


def _ablation(changes: Sequence[Change]) -> Table:
    names = ("predicted", "gain", "published", "gain")
    table = make_columns(("change", "left"), *((name, "right") for name in names))
    for place, change in enumerate(changes):
        table.add_row(change.name, *ablation_cells(change, is_first=place == 0))
    return table


def percent(error: float) -> str:
    """A signed error, per cent."""
    return f"{100 * error:+.1f} %"


def _change_json(change: Change) -> dict[str, Any]:
    return {
        "change": change.name,
        "predicted_mfu_points": change.predicted,
        "predicted_gain_points": change.gain,
        "published_mfu_points": change.published,
        "published_gain_points": change.published_gain,
    }


def _table_json(result: TableResult) -> dict[str, Any]:
    sizes = np.abs(result.errors)
    null = np.abs(result.null_errors)
    return {
        "table": result.setting.table,
        "title": result.setting.title,
        "mean_error_ratio": result.mean_error,
        "max_error_ratio": float(sizes.max()),
        "null_mean_error_ratio": float(null.mean()) if len(null) else None,
        "null_max_error_ratio": float(null.max()) if len(null) else None,
        "assumed": dict(result.setting.assumed),
        "spread_mean_error_ratio": dict(result.spread),
        "rows": [
            {
                "row_id": one.row.row_id,
                "devices": one.row.devices,
                "global_batch_sequences": one.row.global_batch,
                "measured_s": one.row.step_s,
                "predicted_s": one.prediction.step_s,
                "error_ratio": one.error,
                "null_error_ratio": float(result.null_errors[place]) if len(result.null_errors) else None,
            }
            for place, one in enumerate(result.compared)
        ],
    }
