"""What `phalanx plan validate` does: compare, show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path

import click
from rich.console import Console

from phalanx.cli.tables import make_console
from phalanx.core.errors import UserError
from phalanx.figures.validations import errors_by_row
from phalanx.plan.report.page import place, write_page
from phalanx.plan.report.validation_text import validation_json, validation_text
from phalanx.plan.validate.ablation import Change, ablation
from phalanx.plan.validate.compare import TableResult, compare_all
from phalanx.plan.validate.rows import TABLES

_PAGE_COLUMNS = 100


def validate(folder: Path | None, *, all_rows: bool, with_spread: bool, as_json: bool, html: Path | None) -> None:
    """Compare all tables of `folder`, and show them as asked.

    Raises:
        UserError: there are none, or one cannot be read.
    """
    results = compare_all(folder or TABLES, with_spread)
    if not results:
        cure = "name its files as those of phalanx/plan/validate/tables"
        raise UserError("no table in it has known settings", cure=cure, field="--tables", value=str(folder))
    changes = ablation() if folder is None else []
    if html is not None:
        _write_page(html, results, changes)
    if as_json:
        click.echo(json.dumps(validation_json(results, changes), indent=1))
        return
    console = make_console()
    console.print(validation_text(results, changes, width=console.width, all_rows=all_rows), highlight=False)
    if html is not None:
        console.print(f"\npage: {html}", markup=False, highlight=False, soft_wrap=True)


def _write_page(path: Path, results: Sequence[TableResult], changes: Sequence[Change]) -> None:
    text = StringIO()
    console = Console(file=text, width=_PAGE_COLUMNS, color_system=None)
    console.print(validation_text(results, changes, width=_PAGE_COLUMNS), highlight=False)
    rows = [
        {"table": each.setting.title, "row": one.row.row_id, "measured_s": one.row.step_s, "error": one.error}
        for each in results
        for one in each.compared
    ]
    name = "Predicted against published step times"
    sections = [f"<h1>{name}</h1>", place("errors"), f"<pre>{escape(text.getvalue())}</pre>"]
    write_page(path, name, sections, {"errors": errors_by_row(rows)})
