"""What `phalanx plan CONFIG` and `phalanx plan CONFIG --search` do: load, predict or search, show. Needs no torch."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import click

from phalanx.cli.planning import Planned, as_efficient, cluster_of, job_to_search, plan_of, program_named
from phalanx.cli.tables import make_console, tell_page
from phalanx.core import units
from phalanx.core.config import load
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.predict import predict
from phalanx.plan.report.page_blocks import Heading, write_page
from phalanx.plan.report.report_json import prediction_json, search_json
from phalanx.plan.report.report_model import PredictionReport
from phalanx.plan.report.report_page import prediction_figures, prediction_sections, search_figures, search_sections
from phalanx.plan.report.report_text import prediction_text, run_line
from phalanx.plan.report.search_text import search_text
from phalanx.plan.score import score
from phalanx.plan.search.constraints import SearchTarget, parse, restricted
from phalanx.plan.search.frontier import CostModel
from phalanx.plan.search.search import reliefs, search
from phalanx.plan.stages import Known
from phalanx.plan.types import Job, Prediction
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
    """Predict the run of `config`, and show it as asked.

    Raises:
        UserError: anything that a person can mend.
    """
    loaded = load(RunConfig, config, overrides).value
    machine, said = cluster_of(loaded, cluster, devices)
    planned = as_efficient(plan_of(loaded, machine, program=software), machine, efficiency)
    planned = replace(planned, remarks=(*said, *planned.remarks))
    report = report_with(predict(planned.job, planned.strategy, machine), config.stem, planned, machine)
    if not report.fits:
        costs = costs_of(planned.job, machine)
        report = replace(report, reliefs=reliefs(planned.job, planned.strategy, SearchTarget.of(machine), costs))
    if html is not None:
        write_page(html, f"{report.name} on {machine.name}", prediction_sections(report), prediction_figures(report))
    if as_json:
        click.echo(json.dumps(prediction_json(report), indent=1))
    else:
        console = make_console()
        console.print(prediction_text(report, width=console.width, sources=sources), highlight=False)
        tell_page(console, html)
        if not report.fits:
            console.print("\n--search looks for layouts that fit", markup=False, highlight=False)
    if not report.fits:
        sys.exit(_DOES_NOT_FIT)


def costs_of(job: Job, machine: Cluster) -> CostModel:
    """Bounds and predictions of any layout of a job on a cluster; what predictions have in common is kept."""
    known: Known = {}
    return CostModel(
        lambda strategy: score(job, strategy, machine),
        lambda strategy: predict(job, strategy, machine, known),
    )


def report_with(prediction: Prediction, name: str, planned: Planned, cluster: Cluster) -> PredictionReport:
    """A prediction with what a reader holds it against."""
    return PredictionReport(
        prediction=prediction,
        name=name,
        parameters=planned.parameters,
        device=cluster.device.name,
        device_memory_bytes=cluster.device.memory_bytes,
        total_tokens=planned.total_tokens,
        usd_per_device_hour=cluster.value("price.usd_per_device_hour") or None,
        remarks=planned.remarks,
    )


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
    program = program_named(software)
    asked = parse(where)
    if program is not None:
        asked = restricted(asked, program.name)
    loaded = load(RunConfig, config, overrides).value
    machine, said = cluster_of(loaded, cluster, devices)
    searched = as_efficient(job_to_search(loaded, machine), machine, efficiency)
    if program is not None:
        searched = replace(searched, job=replace(searched.job, software=program))
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
