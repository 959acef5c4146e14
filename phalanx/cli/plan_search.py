"""What `phalanx plan CONFIG --search` does: load, search, show. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from phalanx.cli.plan_predict import costs_of, report_with
from phalanx.cli.planning import as_efficient, as_program, cluster_of, job_to_search
from phalanx.cli.tables import make_console, tell_page
from phalanx.core import units
from phalanx.core.config import load
from phalanx.plan.report.as_json import prediction_json, search_json
from phalanx.plan.report.page import (
    prediction_figures,
    prediction_sections,
    search_figures,
    search_sections,
)
from phalanx.plan.report.page_blocks import Heading, write_page
from phalanx.plan.report.search_text import search_text
from phalanx.plan.report.text import run_line
from phalanx.plan.search.constraints import SearchTarget, parse
from phalanx.plan.search.search import search
from phalanx.train.config import RunConfig


def search_command(
    config: Path,
    overrides: tuple[str, ...],
    cluster: str | None,
    devices: int | None,
    software: str | None,
    efficiency: float | None,
    where: tuple[str, ...],
    top: int,
    as_json: bool,
    html: Path | None,
) -> None:
    """Search the best layouts for the run of `config`, and show them as asked.

    Raises:
        UserError: anything that a person can mend; that nothing is possible, or fits, is among it.
    """
    asked = parse(where)
    loaded = load(RunConfig, config, overrides).value
    machine, said = cluster_of(loaded, cluster, devices)
    searched = as_efficient(as_program(job_to_search(loaded, machine), software), machine, efficiency)
    searched = replace(searched, remarks=(*said, *searched.remarks))
    result = search(searched.job, SearchTarget.of(machine), costs_of(searched.job, machine), asked, top)
    report = report_with(result.best[0], config.stem, searched, machine)
    title = (
        f"{config.stem}: {units.count(searched.parameters)} parameters on {machine.devices:,} x {machine.device.name} "
        f"(cluster {machine.name})"
    )
    if html is not None:
        sections = [Heading(title, 1), *search_sections(result), *prediction_sections(report, "The fastest layout")]
        write_page(html, title, sections, search_figures(result) | prediction_figures(report))
    if as_json:
        click.echo(json.dumps(search_json(result) | {"prediction_of_best": prediction_json(report)}, indent=1))
        return
    console = make_console()
    shown = search_text(result, title, run=run_line(report), width=console.width)
    console.print(shown, highlight=False)
    tell_page(console, html)
