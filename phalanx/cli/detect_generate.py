"""`phalanx detect generate`: monitoring data of jobs that are made up, with labels. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import AS_JSON, FiniteRange, in_words_of
from phalanx.core.errors import UserError

if TYPE_CHECKING:
    from phalanx.detect.monitoring.job_scenarios import Scenario

_EXAMPLES = """\b
Examples:
  phalanx detect generate cases --cases 20
  phalanx detect generate cases --fault "NIC dropout" --machines 128 --metrics all
  phalanx detect generate cases --fault "machine unreachable" --machines 256 --faulty 16
  phalanx detect generate cases --fault none --minutes 60 --split test
  phalanx detect generate cases --machines 200 --openmetrics
  phalanx detect generate cases --noise dcgm.parquet
"""


@click.command(epilog=_EXAMPLES)
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--cases", type=click.IntRange(1, 100_000), default=1, metavar="N", help="Tables to write [1].")
@click.option(
    "--split", type=click.Choice(["develop", "test", "final"]), default="develop", help="Seeds and ranges [develop]."
)
@click.option(
    "--first", type=click.IntRange(0, 1_000_000), default=0, metavar="K", help="Number of the first one, a seed [0]."
)
@click.option("--fault", metavar="CLASS", help="Of every table, or none [classes by their shares in production].")
@click.option("--machines", type=click.IntRange(2, 100_000), metavar="N", help="Of every job [drawn].")
@click.option("--faulty", type=click.IntRange(1), metavar="N", help="Machines that a fault takes at once [mostly 1].")
@click.option("--minutes", type=FiniteRange(1, 1440), default=15.0, metavar="M", help="Of every table [15].")
@click.option("--metrics", default="seven", metavar="LIST", help="seven (Minder's), all (21), or names with commas.")
@click.option("--noise", type=click.Path(path_type=Path), metavar="FILE", help="Take the noise of these real hosts.")
@click.option("--openmetrics", is_flag=True, help="Also write what promtool backfills into Prometheus.")
@AS_JSON
@click.help_option("-h", "--help")
def command(out: Path, as_json: bool, **options: Any) -> None:
    """Write monitoring data of training jobs that are made up, with a fault or without, and what is wrong in them.

    A sample a second of every machine, as Parquet; labels.json names faults, machines and onsets. The same numbers give
    the same data everywhere. What is in them, and which ranges the splits draw from: docs/detect_data.md.
    """
    from phalanx.core.files import write_json
    from phalanx.detect.monitoring.metric_generator import generate
    from phalanx.detect.monitoring.metric_residuals import read_residuals
    from phalanx.detect.monitoring.simulated_exporters import write_openmetrics
    from phalanx.detect.monitoring.table_files import write_table

    with in_words_of(options):
        scenarios = _scenarios(options)
    noise = read_residuals(options["noise"]) if options["noise"] else None
    metrics = _metrics(options["metrics"])
    try:
        if out.exists() and any(out.iterdir()):
            raise UserError("is not empty", cure="name a new folder", field="OUT", value=str(out))
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be made ({error.strerror or error})"
        raise UserError(problem, cure="name a folder that you may write", field="OUT", value=str(out)) from None
    labels = []
    for scenario in scenarios:
        case = generate(scenario, metrics, real_noise=noise)
        write_table(case.table, out / f"{scenario.name}.parquet")
        if options["openmetrics"]:
            write_openmetrics(case.table, out / f"{scenario.name}.om")
        labels.append(case.labels.as_json())
        if not as_json:
            click.echo(_line(labels[-1]))
    write_json(out / "labels.json", {"cases": labels})
    if as_json:
        click.echo(json.dumps({"cases": labels}, indent=1, ensure_ascii=False))


def _scenarios(options: dict[str, Any]) -> Sequence[Scenario]:
    from phalanx.detect.monitoring.job_scenarios import draw_scenario, drawn_classes

    split, first, cases = options["split"], options["first"], options["cases"]
    fault = options["fault"]
    classes: list[str | None] = [None if fault == "none" else fault] * cases
    if fault is None:
        classes = [*drawn_classes(split, first + cases)[first:]]
    seconds = round(options["minutes"] * 60)
    return [
        draw_scenario(
            split,
            number,
            fault=one,
            machines=options["machines"],
            faulty=options["faulty"] if one else None,
            duration_s=seconds,
        )
        for number, one in enumerate(classes, first)
    ]


def _metrics(given: str) -> tuple[str, ...]:
    from phalanx.detect.monitoring.metric_catalogue import CATALOGUE, DETECTED, known_metric

    if given in ("seven", "all"):
        return DETECTED if given == "seven" else tuple(CATALOGUE)
    return tuple(known_metric(name.strip()).name for name in given.split(",") if name.strip())


def _line(labels: dict[str, Any]) -> str:
    size = f"{labels['case']}: {labels['machines']} machines, {labels['samples']} s"
    if not labels["faults"]:
        return f"{size}, healthy"
    (fault,) = labels["faults"]
    onset_s, end_s = (fault[f"{one}_unix_s"] - labels["start_unix_s"] for one in ("start", "end"))
    until = f"to {end_s:.0f} s, then the job is restarted" if end_s < labels["samples"] else "on"
    who = ", ".join(fault["machines"])
    return f"{size}, {fault['fault']} ({fault['signature']}) of {who} from {onset_s:.0f} s {until}"
