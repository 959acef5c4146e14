"""What `phalanx plan CONFIG` and `phalanx plan CONFIG --search` do: load, predict or search, show."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from phalanx.api.planning import plan, search
from phalanx.cli.tables import make_console, print_page_path
from phalanx.core import units
from phalanx.core.config import load
from phalanx.figures.pages.page_blocks import Heading, write_page
from phalanx.plan.report.report_model import prediction_json, search_json
from phalanx.plan.report.report_page import prediction_figures, prediction_sections, search_figures, search_sections
from phalanx.plan.report.report_text import prediction_text, run_line, search_text
from phalanx.train.config import RunConfig

_DOES_NOT_FIT = 1


def predict_command(
    config: Path,
    overrides: tuple[str, ...],
    cluster: str | None,
    devices: int | None,
    software: str | None,
    efficiency: float | None,
    sources: bool,
    as_json: bool,
    html: Path | None,
) -> None:
    """Predict the run of `config`, and show it as asked."""
    run = load(RunConfig, config, overrides).value
    report = plan(run, cluster, devices, name=config.stem, software=software, efficiency=efficiency)
    if html is not None:
        title = f"{report.name} on {report.prediction.cluster}"
        write_page(html, title, prediction_sections(report), prediction_figures(report))
    if as_json:
        click.echo(json.dumps(prediction_json(report), indent=1))
    else:
        console = make_console()
        console.print(prediction_text(report, width=console.width, sources=sources), highlight=False)
        print_page_path(console, html)
        if not report.fits:
            console.print("\n--search looks for layouts that fit", markup=False, highlight=False)
    if not report.fits:
        sys.exit(_DOES_NOT_FIT)


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
    """Search the best layouts for the run of `config`, and show them as asked."""
    run = load(RunConfig, config, overrides).value
    found = search(
        run, cluster, devices, where=where, top=top, name=config.stem, software=software, efficiency=efficiency
    )
    result, best = found.result, found.best
    title = (
        f"{config.stem}: {units.count(best.parameters)} parameters on {best.prediction.devices:,} x {best.device} "
        f"(cluster {best.prediction.cluster})"
    )
    if html is not None:
        sections = [Heading(title, 1), *search_sections(result), *prediction_sections(best, "The fastest layout")]
        write_page(html, title, sections, search_figures(result) | prediction_figures(best))
    if as_json:
        click.echo(json.dumps(search_json(result) | {"prediction_of_best": prediction_json(best)}, indent=1))
        return
    console = make_console()
    console.print(search_text(result, title, run=run_line(best), width=console.width), highlight=False)
    print_page_path(console, html)
