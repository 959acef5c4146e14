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
        pieces += [title(result.setting.title), *_rows(result, all_rows), *_choices(result, width), ""]
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


def _rows(result: TableResult, all_rows: bool) -> list[RenderableType]:
    """A line for each row; of long tables the worst."""
    order = list(range(len(result.compared)))
    shown = order
    if len(order) > _MOST_ROWS and not all_rows:
        worst = sorted(order, key=lambda place: -abs(result.errors[place]))[:_MOST_ROWS]
        shown = sorted(worst)
    table = make_columns(
        ("row", "left"), ("devices", "right"), ("batch", "right"), ("measured s", "right"), ("predicted s", "right")
    )
    for name in ("error", "null model"):
        table.add_column(name, justify="right", no_wrap=True, header_style="")
    for place in shown:
        one = result.compared[place]
        null = percent(result.null_errors[place]) if len(result.null_errors) else "-"
        numbers = (f"{one.row.devices:,}", f"{one.row.global_batch:,}", f"{one.row.step_s:.3f}")
        table.add_row(one.row.row_id, *numbers, f"{one.prediction.step_s:.3f}", percent(one.error), null)
    left_out = len(order) - len(shown)
    return [table, *([Text(f"and {left_out} rows that are nearer (--rows shows all)", "dim")] if left_out else [])]


def _choices(result: TableResult, width: int) -> list[Text]:
    """What is assumed, and what else it could be comes to."""
    lines = [f"assumed: {name}: {why}" for name, why in result.setting.assumed.items()]
    if result.spread:
        others = ", ".join(f"{name}: {100 * error:.1f} %" for name, error in result.spread.items())
        lines.append(f"mean error {100 * result.mean_error:.1f} %; with other choices: {others}")
    return [Text(wrapped(line, width, "  "), "dim") for line in lines]


def _summary(results: Iterable[TableResult]) -> Table:
    table = make_columns(("table", "left"), ("rows", "right"), ("mean", "right"), ("max", "right"))
    for name in ("null mean", "null max"):
        table.add_column(name, justify="right", no_wrap=True, header_style="")
    for result in results:
        cells = [*_mean_and_most(result.errors), *_mean_and_most(result.null_errors)]
        table.add_row(result.setting.title, str(len(result.compared)), *cells)
    return table


def _mean_and_most(errors: NDArray[np.float64]) -> tuple[str, str]:
    if not len(errors):
        return "-", "-"
    sizes = np.abs(errors)
    return f"{100 * sizes.mean():.2f} %", f"{100 * sizes.max():.1f} %"


def _ablation(changes: Sequence[Change]) -> Table:
    table = make_columns(
        ("change", "left"), ("predicted", "right"), ("gain", "right"), ("published", "right"), ("gain", "right")
    )
    for place, change in enumerate(changes):
        gains = (f"{change.gain:+.1f}", f"{change.published_gain:+.1f}") if place else ("", "")
        table.add_row(change.name, f"{change.predicted:.1f}", gains[0], f"{change.published:.1f}", gains[1])
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
