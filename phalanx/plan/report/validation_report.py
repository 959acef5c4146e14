"""Predictions beside published measurements: for a terminal, as JSON, and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.figures.pages.page_blocks import Block, Cell, FigurePlace, Fold, Heading, PageTable, numbers, soft
from phalanx.figures.plan import errors_by_row
from phalanx.figures.style import Figure
from phalanx.plan.overheads import LEAST_EFFICIENCY, MOST_EFFICIENCY
from phalanx.plan.report.report_text import make_columns, title, wrapped
from phalanx.plan.validate.compare import Change, Own, TableResult, is_inside
from phalanx.plan.validate.left_out import Judged

_MOST_ROWS = 12
_ROW = ("row", "devices", "batch", "measured s", "predicted s", "error", "null model")
_SUMMARY = ("table", "rows", "mean", "max", "null mean", "null max")
_LEFT_OUT = ("table", "rows", "plain", "constant", "recompute", "learnt", "signed", "others", "inside", "others")


def validation_text(
    results: Sequence[TableResult],
    changes: Sequence[Change],
    left_out: Sequence[Judged] = (),
    *,
    width: int = 80,
    all_rows: bool = False,
) -> RenderableType:
    """Every table with its rows (of long ones the worst, or all), a summary, the ablation, and tables left out."""
    pieces: list[RenderableType] = []
    for result in results:
        shown = _places_shown(result, all_rows)
        pieces += [title(result.setting.title), _text_table(_ROW, [_row_cells(result, place) for place in shown])]
        if more := len(result.compared) - len(shown):
            pieces.append(Text(f"and {more} rows that are nearer (--rows shows all)", "dim"))
        pieces += [*(Text(wrapped(line, width, "  "), "dim") for line in _assumed_lines(result)), ""]
    pieces += [title("all tables; the null model is fitted to all rows of a table but the one that it predicts")]
    pieces += [_text_table(_SUMMARY, _summary(results))]
    pieces += [Text(wrapped(line, width, "  ")) for line in _after_comparing_lines(results)]
    if changes:
        names = ("change", "predicted", "gain", "published", "gain")
        table = _text_table(names, _ablation(changes))
        pieces += ["", title("MegaScale, table 3: points of MFU after each change"), table]
    if left_out:
        heading = "tables left out: the residual is learnt from the other tables, or from other publications alone"
        pieces += ["", title(heading), _text_table(_LEFT_OUT, [(one.title, *left_out_cells(one)) for one in left_out])]
        pieces += [Text(wrapped(left_out_line(left_out), width), "dim")]
    return Group(*pieces)


def own_text(own: Own, *, width: int = 80) -> RenderableType:
    """Steps of one's own with their errors, and which efficiency they have."""
    rows = []
    for one in own.compared:
        row, between = one.row, one.prediction.interval_s
        sizes = (row.row_id, f"{row.devices:,}", f"{row.global_batch:,}", f"{row.step_s:.3f}")
        interval = f"{between[0]:.3f} to {between[1]:.3f}" if between else "-"
        errors = (percent(one.error), percent(own.left(one)))
        rows.append((*sizes, f"{one.prediction.step_s:.3f}", interval, *errors))
    table = _text_table(("row", "devices", "batch", "measured s", "predicted s", "8 of 10", "error", "with it"), rows)
    mean, most = _mean_and_most(np.array([own.left(one) for one in own.compared]))
    count = len(own.compared)
    verdict = f"efficiency {own.efficiency:.3f}, the median of {count} step{'s' * (count > 1)}: "
    if LEAST_EFFICIENCY <= own.efficiency <= MOST_EFFICIENCY:
        verdict += f"give --efficiency {own.efficiency:.3f}, or write efficiency_ratio into the cluster's file."
    else:
        verdict += "no program is so far from its prediction. iter_time_s is in seconds; are sizes and cluster right?"
    if own.too_large:
        verdict += f" Predicted to take more memory than a device has: {', '.join(own.too_large)}."
    if own.inside is not None:
        verdict += f" {100 * own.inside:.0f} % lie in the interval that is predicted without it."
    if count > 1:
        verdict += f" With it they are off by {mean}, {most} at most."
    return Group(table, "", Text(wrapped(verdict, width), "bold"))


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
    ablation = [
        {
            "change": change.name,
            "predicted_mfu_points": change.predicted,
            "predicted_gain_points": change.gain,
            "published_mfu_points": change.published,
            "published_gain_points": change.published_gain,
        }
        for change in changes
    ]
    tables = list(map(_table_json, results))
    return {"version": 1, "tables": tables, "ablation": ablation, "left_out": list(map(asdict, left_out))}


def _table_json(result: TableResult) -> dict[str, Any]:
    sizes, null = np.abs(result.errors), np.abs(result.null_errors)
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
                "null_error_ratio": float(result.null_errors[place]) if len(null) else None,
            }
            for place, one in enumerate(result.compared)
        ],
    }


def validation_sections(
    results: Sequence[TableResult], changes: Sequence[Change], left_out: Sequence[Judged] = (), *, all_rows: bool
) -> list[Block]:
    """All tables in short, the ablation, and every table with its rows; `validation_figures` has the figure."""
    blocks: list[Block] = [FigurePlace("errors"), Heading("All tables"), _page_table(_SUMMARY, _summary(results))]
    blocks += map(soft, _after_comparing_lines(results))
    blocks.append(soft("The null model is fitted to all rows of a table but the one that it predicts."))
    if changes:
        names = ("change", "predicted", "gain", "published", "published gain")
        table = _page_table(names, _ablation(changes))
        blocks += [Heading("MegaScale, table 3: points of MFU after each change"), table]
    if left_out:
        rows = [(one.title, *left_out_cells(one)) for one in left_out]
        blocks += [Heading("Tables left out"), _page_table(_LEFT_OUT, rows), soft(left_out_line(left_out))]
    blocks.append(Heading("Row by row"))
    for result in results:
        mean, most = _mean_and_most(result.errors)
        shown = _places_shown(result, all_rows)
        more = len(result.compared) - len(shown)
        lines = [*([f"and {more} rows that are nearer"] if more else []), *_assumed_lines(result)]
        table = _page_table(_ROW, [_row_cells(result, place) for place in shown])
        blocks.append(Fold(f"{result.setting.title}: mean {mean}, largest {most}", [table, *map(soft, lines)]))
    return blocks


def validation_figures(results: Sequence[TableResult]) -> dict[str, Figure]:
    """The figure of `validation_sections`."""
    rows = [
        {"table": each.setting.title, "row": one.row.row_id, "measured_s": one.row.step_s, "error": one.error}
        for each in results
        for one in each.compared
    ]
    return {"errors": errors_by_row(rows)}


def _places_shown(result: TableResult, all_rows: bool) -> list[int]:
    every = range(len(result.compared))
    if len(every) <= _MOST_ROWS or all_rows:
        return list(every)
    return sorted(sorted(every, key=lambda place: -abs(result.errors[place]))[:_MOST_ROWS])


def _row_cells(result: TableResult, place: int) -> tuple[str, ...]:
    one = result.compared[place]
    null = percent(result.null_errors[place]) if len(result.null_errors) else "-"
    sizes = (f"{one.row.devices:,}", f"{one.row.global_batch:,}", f"{one.row.step_s:.3f}")
    return (one.row.row_id, *sizes, f"{one.prediction.step_s:.3f}", percent(one.error), null)


def _assumed_lines(result: TableResult) -> list[str]:
    lines = [f"assumed: {name}: {why}" for name, why in result.setting.assumed.items()]
    if result.spread:
        others = ", ".join(f"{name}: {100 * error:.1f} %" for name, error in result.spread.items())
        lines.append(f"mean error {100 * result.mean_error:.1f} %; with other choices: {others}")
    return lines


def _after_comparing_lines(results: Iterable[TableResult]) -> list[str]:
    """What errors rest on choices that were made after comparing, and what the others come to."""
    lines = []
    for result in results:
        others = [
            f"{error:.1%} with {choice}".replace("%", " %")
            for choice, error in result.spread.items()
            if choice.partition(" = ")[0] in result.setting.after_comparing
        ]
        if others:
            mean = f"{100 * result.mean_error:.1f} %"
            lines.append(f"{result.setting.title}: {mean} rests on choices made after comparing: {', '.join(others)}")
    return lines


def _summary(results: Iterable[TableResult]) -> list[tuple[str, ...]]:
    return [
        (one.setting.title, str(len(one.compared)), *_mean_and_most(one.errors), *_mean_and_most(one.null_errors))
        for one in results
    ]


def _mean_and_most(errors: NDArray[np.float64]) -> tuple[str, str]:
    if not len(errors):
        return "-", "-"
    sizes = np.abs(errors)
    return f"{100 * sizes.mean():.2f} %", f"{100 * sizes.max():.1f} %"


def _ablation(changes: Sequence[Change]) -> list[tuple[str, ...]]:
    """Predicted and published points with what each gains; the first is what the others change."""
    rows: list[tuple[str, ...]] = []
    for place, change in enumerate(changes):
        gain, published_gain = (f"{change.gain:+.1f}", f"{change.published_gain:+.1f}") if place else ("", "")
        rows.append((change.name, f"{change.predicted:.1f}", gain, f"{change.published:.1f}", published_gain))
    return rows


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


def percent(error: float) -> str:
    """A signed error, per cent."""
    return f"{100 * error:+.1f} %"


def _text_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = make_columns((names[0], "left"), *((name, "right") for name in names[1:]))
    for row in rows:
        table.add_row(*row)
    return table


def _page_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> PageTable:
    cells = [[Cell(first, "first"), *numbers(rest)] for first, *rest in rows]
    return PageTable([Cell(names[0]), *numbers(names[1:])], cells, stacked=True)
