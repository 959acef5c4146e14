"""What `phalanx plan validate` does: compare, show."""

from __future__ import annotations

import json
from pathlib import Path

import click

from phalanx.cli.tables import make_console, print_page_path
from phalanx.core.errors import UserError
from phalanx.figures.pages.page_blocks import Heading, write_page
from phalanx.plan.report.validation_report import (
    own_json,
    own_text,
    validation_figures,
    validation_json,
    validation_sections,
    validation_text,
)
from phalanx.plan.validate.compare import ablation, compare_all, compare_own
from phalanx.plan.validate.left_out import judge, rows_of
from phalanx.plan.validate.published import TABLES

_TITLE = "Predicted against published step times"


def validate(folder: Path | None, *, all_rows: bool, with_spread: bool, as_json: bool, html: Path | None) -> None:
    """Compare all tables of `folder`, and show them as asked."""
    results = compare_all(folder or TABLES, with_spread)
    if not results:
        cure = "name its files as those of phalanx/plan/validate/tables"
        raise UserError("no table in it has known settings", cure=cure, field="--tables", value=str(folder))
    changes = ablation() if folder is None else []
    left_out = judge(rows_of()) if folder is None else []
    if html is not None:
        sections = [Heading(_TITLE, 1), *validation_sections(results, changes, left_out, all_rows=all_rows)]
        write_page(html, _TITLE, sections, validation_figures(results))
    if as_json:
        click.echo(json.dumps(validation_json(results, changes, left_out), indent=1))
        return
    console = make_console()
    shown = validation_text(results, changes, left_out, width=console.width, all_rows=all_rows)
    console.print(shown, highlight=False)
    print_page_path(console, html)


def validate_own(file: Path, cluster: str | None, software: str | None, *, as_json: bool, html: Path | None) -> None:
    """Predict steps of one's own, and say which efficiency they have."""
    if html is not None:
        cure = "leave it out; --json has all of it"
        raise UserError("is about published tables", cure=cure, field="--html", value=str(html))
    own = compare_own(file, cluster, software)
    if as_json:
        click.echo(json.dumps(own_json(own), indent=1))
        return
    console = make_console()
    console.print(own_text(own, width=console.width), highlight=False)
