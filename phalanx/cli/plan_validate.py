"""`phalanx plan validate`: every published measurement predicted again. Its help imports only click."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.options import AS_JSON, HTML


@click.command()
@click.option(
    "--tables", type=click.Path(path_type=Path), metavar="FILE|DIR", help="Steps of yours (CSV); or tables as ours."
)
@click.option("--cluster", metavar="NAME|FILE", help="Of rows of FILE that name none.")
@click.option("--software", metavar="NAME", help="Of rows of FILE that name none; else Phalanx.")
@click.option("--rows", "all_rows", is_flag=True, help="All rows of long tables, not the worst alone.")
@click.option("--no-spread", is_flag=True, help="Leave out what other choices of what is unpublished come to.")
@AS_JSON
@HTML
def command(
    tables: Path | None,
    cluster: str | None,
    software: str | None,
    all_rows: bool,
    no_spread: bool,
    as_json: bool,
    html: Path | None,
) -> None:
    """Predict every published step time, and print the error of each row, their mean and maximum.

    Beside them stands the null model: two numbers fitted to all other rows of a table. What a publication leaves open
    was assumed once, before the first comparison; what other choices would come to is printed too. Below stand the
    tables that were left out when the planner's residual was learnt, with the interval that predictions carry.

    --tables FILE predicts steps of your own, and says the --efficiency to give; docs/plan_validate.md has its columns.
    """
    from phalanx.cli.validation import validate, validate_own  # not before: help comes without it

    if tables is not None and not tables.is_dir():
        validate_own(tables, cluster, software, as_json=as_json, html=html)
        return
    validate(tables, all_rows=all_rows, with_spread=not no_spread, as_json=as_json, html=html)
