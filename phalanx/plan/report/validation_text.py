"""Predictions held against published measurements, for a person at a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.plan.overheads import LEAST_EFFICIENCY, MOST_EFFICIENCY
from phalanx.plan.report.report_text import make_columns, title, wrapped
from phalanx.plan.validate.assumptions import AFTER_COMPARING
from phalanx.plan.validate.compare import Change, Own, TableResult, is_inside
from phalanx.plan.validate.left_out import Judged

_MOST_ROWS = 12


def validation_text(
    results: Sequence[TableResult],
    changes: Sequence[Change],
    left_out: Sequence[Judged] = (),
    *,
    width: int = 80,
    all_rows: bool = False,
) -> RenderableType:
    """Every table with its rows, then all tables in short, the ablation, and tables that were left out.

    Args:
        all_rows: of long tables all rows, not the worst alone.
    """
    pieces: list[RenderableType] = []
    for result in results:
        pieces += [title(result.setting.title), *_rows(result, all_rows)]
        pieces += [*(Text(wrapped(line, width, "  "), "dim") for line in assumed_lines(result)), ""]
    pieces += [title("all tables; the null model is fitted to all rows of a table but the one that it predicts")]
    pieces += [_summary(results), *(Text(wrapped(line, width, "  ")) for line in after_comparing_lines(results))]
    if changes:
        pieces += ["", title("MegaScale, table 3: points of MFU after each change"), _ablation(changes)]
    if left_out:
        pieces += ["", title(LEFT_OUT), _left_out(left_out)]
        pieces += [Text(wrapped(left_out_line(left_out), width), "dim")]
    return Group(*pieces)


def own_text(own: Own, *, width: int = 80) -> RenderableType:
    """Steps of one's own with their errors, and which efficiency they have."""
    numbers = ("devices", "batch", "measured s", "predicted s", "8 of 10", "error", "with it")
    table = make_columns(("row", "left"), *((name, "right") for name in numbers))
    for one in own.compared:
        row = (f"{one.row.devices:,}", f"{one.row.global_batch:,}", f"{one.row.step_s:.3f}")
        between = one.prediction.interval_s
        cells = (
            *(*row, f"{one.prediction.step_s:.3f}"),
            f"{between[0]:.3f} to {between[1]:.3f}" if between else "-",
            *(percent(one.error), percent(own.left(one))),
        )
        table.add_row(one.row.row_id, *cells)
    errors = np.array([own.left(one) for one in own.compared])
    mean, most = mean_and_most(errors)
    count = len(own.compared)
    said = f"efficiency {own.efficiency:.3f}, the median of {count} step{'s' * (count > 1)}: "
    if LEAST_EFFICIENCY <= own.efficiency <= MOST_EFFICIENCY:
        said += f"give --efficiency {own.efficiency:.3f}, or write efficiency_ratio into the cluster's file."
    else:
        said += "no program is so far from its prediction. iter_time_s is in seconds; are sizes and cluster right?"
    if own.too_large:
        said += f" Predicted to take more memory than a device has: {', '.join(own.too_large)}."
    if own.inside is not None:
        said += f" {100 * own.inside:.0f} % lie in the interval that is predicted without it."
    if count > 1:
        said += f" With it they are off by {mean}, {most} at most."
    return Group(table, "", Text(wrapped(said, width), "bold"))


def own_json(own: Own) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "version": 1,
        "efficiency_ratio": own.efficiency,
        "inside_ratio": own.inside,
        "too_large": list(own.too_large),
        "rows": [
            {
                "row_id": one.row.row_id,
                "measured_s": one.row.step_s,
                "predicted_s": one.prediction.step_s,
                "interval_s": one.prediction.interval_s and list(map(float, one.prediction.interval_s)),
                "inside": is_inside(one),
                "error_ratio": one.error,
                "error_with_efficiency_ratio": own.left(one),
            }
            for one in own.compared
        ],
    }


def validation_json(
    results: Sequence[TableResult], changes: Sequence[Change], left_out: Sequence[Judged] = ()
) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "version": 1,
        "tables": [_table_json(result) for result in results],
        "ablation": list(map(_change_json, changes)),
        "left_out": list(map(asdict, left_out)),
    }


def places_shown(result: TableResult, all_rows: bool) -> list[int]:
    """Which rows of a table are shown, in its order: of a long one the worst."""
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


def after_comparing_lines(results: Iterable[TableResult]) -> list[str]:
    """What errors rest on choices that were made after comparing, and what the others come to."""
    lines = []
    for result in results:
        names = AFTER_COMPARING.get(result.setting.table, ())
        others = [
            f"{error:.1%} with {choice}".replace("%", " %")
            for choice, error in result.spread.items()
            if choice.partition(" = ")[0] in names
        ]
        if others:
            mean = f"{100 * result.mean_error:.1f} %"
            lines.append(f"{result.setting.title}: {mean} rests on choices made after comparing: {', '.join(others)}")
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


LEFT_OUT = "tables left out: the residual is learnt from the other tables, or from other publications alone"
LEFT_OUT_COLUMNS = ("rows", "plain", "constant", "recompute", "learnt", "signed", "others", "inside", "others")


def left_out_cells(one: Judged) -> tuple[str, ...]:
    """A table: rows, then errors of the model, of a constant share of the peak (recompute counted), and learnt."""
    sizes = (one.plain, one.constant, one.constant_again, one.learnt)
    errors = (*(f"{100 * size:.1f} %" for size in sizes), percent(one.signed), f"{100 * one.alone:.1f} %")
    return (str(one.rows), *errors, *(f"{100 * share:.0f} %" for share in (one.inside, one.inside_alone)))


def left_out_line(left_out: Sequence[Judged]) -> str:
    """What the columns are, and all tables in one line."""

    def mean(name: str) -> str:
        return f"{100 * np.mean([getattr(one, name) for one in left_out]):.1f} %"

    def inside(name: str) -> str:
        rows = sum(one.rows for one in left_out)
        return f"{100 * sum(getattr(one, name) * one.rows for one in left_out) / rows:.0f} %"

    constants = f"{mean('constant')}, with what is computed again counted {mean('constant_again')}"
    return (
        f"Mean over tables: plain model {mean('plain')}; one share of the peak learnt from the other tables "
        f"{constants}; residual learnt from the other tables {mean('learnt')}, from other publications "
        f"{mean('alone')}. Of all rows {inside('inside')} lie in their 80 % interval, {inside('inside_alone')} in that "
        "of other publications."
    )


def _left_out(left_out: Sequence[Judged]) -> Table:
    table = make_columns(("table", "left"), *((name, "right") for name in LEFT_OUT_COLUMNS))
    for one in left_out:
        table.add_row(one.title, *left_out_cells(one))
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
