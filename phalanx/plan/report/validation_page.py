"""Predictions held against published measurements, as sections of a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from phalanx.figures.plan import errors_by_row
from phalanx.figures.style import Figure
from phalanx.plan.report.page import place, table
from phalanx.plan.report.validation_text import (
    LEFT_OUT_COLUMNS,
    ablation_cells,
    after_comparing_lines,
    assumed_lines,
    left_out_cells,
    left_out_line,
    mean_and_most,
    places_shown,
    row_cells,
)
from phalanx.plan.validate.ablation import Change
from phalanx.plan.validate.compare import TableResult
from phalanx.plan.validate.left_out import Judged


def validation_sections(
    results: Sequence[TableResult], changes: Sequence[Change], left_out: Sequence[Judged] = (), *, all_rows: bool
) -> list[str]:
    """All tables in short, the ablation, and every table with its rows; `validation_figures` has the figure.

    Args:
        all_rows: of long tables all rows, not the worst alone.
    """
    sections = [place("errors"), "<h2>All tables</h2>", _summary(results)]
    sections += [f'<p class="soft">{escape(line)}</p>' for line in after_comparing_lines(results)]
    sections.append('<p class="soft">The null model is fitted to all rows of a table but the one that it predicts.</p>')
    if changes:
        sections += ["<h2>MegaScale, table 3: points of MFU after each change</h2>", _ablation(changes)]
    if left_out:
        sections += ["<h2>Tables left out</h2>", _left_out(left_out)]
        sections.append(f'<p class="soft">{escape(left_out_line(left_out))}</p>')
    return [*sections, "<h2>Row by row</h2>", *(_rows(result, all_rows) for result in results)]


def validation_figures(results: Sequence[TableResult]) -> dict[str, Figure]:
    """The figure of `validation_sections`."""
    rows = [
        {"table": each.setting.title, "row": one.row.row_id, "measured_s": one.row.step_s, "error": one.error}
        for each in results
        for one in each.compared
    ]
    return {"errors": errors_by_row(rows)}


def _summary(results: Sequence[TableResult]) -> str:
    rows = [
        _row(
            result.setting.title,
            str(len(result.compared)),
            *mean_and_most(result.errors),
            *mean_and_most(result.null_errors),
        )
        for result in results
    ]
    return _table(("table", "rows", "mean", "max", "null mean", "null max"), rows)


def _left_out(left_out: Sequence[Judged]) -> str:
    return _table(("table", *LEFT_OUT_COLUMNS), [_row(one.title, *left_out_cells(one)) for one in left_out])


def _ablation(changes: Sequence[Change]) -> str:
    rows = [_row(change.name, *ablation_cells(change, is_first=number == 0)) for number, change in enumerate(changes)]
    return _table(("change", "predicted", "gain", "published", "published gain"), rows)


def _rows(result: TableResult, all_rows: bool) -> str:
    """A table that can be opened, with what is assumed for it."""
    mean, most = mean_and_most(result.errors)
    shown = places_shown(result, all_rows)
    left_out = len(result.compared) - len(shown)
    lines = [*([f"and {left_out} rows that are nearer"] if left_out else []), *assumed_lines(result)]
    names = ("row", "devices", "batch", "measured s", "predicted s", "error", "null model")
    head = f"<summary>{escape(result.setting.title)}: mean {mean}, largest {most}</summary>"
    body = _table(names, [_row(*row_cells(result, number)) for number in shown])
    return f"<details>{head}{body}{''.join(f'<p class=soft>{escape(line)}</p>' for line in lines)}</details>"


def _table(names: Sequence[str], rows: Sequence[str]) -> str:
    heads = f"<th>{names[0]}</th>" + "".join(f'<th class="n">{name}</th>' for name in names[1:])
    return table(heads, rows, stacked=True)


def _row(first: str, *numbers: str) -> str:
    cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
    return f'<tr><td class="first">{escape(first)}</td>{cells}</tr>'
