"""`phalanx simulate stragglers`: what waiting for the slowest of many ranks costs. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import AS_JSON, HTML, in_words_of

if TYPE_CHECKING:  # NumPy and rich take tenths of a second; help pages do without them
    from phalanx.simulate.straggler_report import StragglerScenario, Waits

_EXAMPLES = """\b
Examples:
  phalanx simulate stragglers --devices 12288
  phalanx simulate stragglers --devices 12288 --pipeline 8 --chunks 6 --schedule interleaved_1f1b --micro-batches 32
  phalanx simulate stragglers --devices 4096 --slow-share 0.002 --slow-excess 0.3 --find-s 50 --json
"""

_SCHEDULES = click.Choice(["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"])
_COUNT = click.IntRange(min=1)


@click.command(epilog=_EXAMPLES)
@click.option("--devices", type=_COUNT, required=True, metavar="N", help="Devices of the job.")
@click.option("--cluster", default="megascale", metavar="NAME|FILE", help="Whose hosts they are [megascale].")
@click.option("--compute-s", type=float, default=1.0, metavar="S", help="Of one rank in a step, not waiting [1].")
@click.option("--tensor", type=_COUNT, metavar="N", help="Tensor-parallel ranks [all of a host].")
@click.option("--pipeline", type=_COUNT, default=1, metavar="N", help="Pipeline ranks [1].")
@click.option("--chunks", type=_COUNT, metavar="N", help="Model chunks on each [1 with 1f1b, else 2].")
@click.option("--schedule", type=_SCHEDULES, default="1f1b", help="Of the pipeline [1f1b].")
@click.option("--micro-batches", type=_COUNT, metavar="N", help="Of one pipeline in a step [one a pipeline rank].")
@click.option("--slow-share", type=float, metavar="X", help="Hosts that are slow, of all [the cluster's].")
@click.option("--slow-excess", type=float, metavar="X", help="By which they are slower [the cluster's].")
@click.option("--lasting-sigma", type=float, metavar="X", help="Spread of the other ranks [the cluster's].")
@click.option("--pass-sigma", type=float, default=0.0, metavar="X", help="Spread of one rank's micro-batches [0].")
@click.option("--slow-per-1000-host-days", type=float, default=0.294, metavar="X", help="One gets so [0.294].")
@click.option("--find-s", type=float, default=1000.0, metavar="S", help="Until it is found and replaced [1000].")
@click.option("--restart-s", type=float, default=300.0, metavar="S", help="The job stands still for that [300].")
@AS_JSON
@HTML
@click.help_option("-h", "--help")
def command(cluster: str, as_json: bool, html: Path | None, **options: Any) -> None:
    """Predict how much longer a step takes because all ranks wait for the slowest of them.

    Slow hosts: with as many as there are where nobody looks for them, and where they are found and replaced. How
    often one gets slow is InfiniteHBD-Trace's (41 faults of 400 hosts in 349 days).
    """
    from phalanx.simulate.straggler_report import waits_by_size

    question = _question(cluster, options)
    _show(question, waits_by_size(question), as_json, html)


def _question(cluster: str, options: dict[str, Any]) -> StragglerScenario:
    from dataclasses import replace

    from phalanx.plan.hardware.cluster import load_cluster
    from phalanx.plan.overheads import spread_of
    from phalanx.simulate.failure_model import require
    from phalanx.simulate.straggler_report import StragglerScenario

    machine = load_cluster(cluster)
    names = ("slow_share", "slow_excess", "lasting_sigma", "pass_sigma")
    given = {name: options[name] for name in names if options[name] is not None}
    require("--slow-per-1000-host-days", options["slow_per_1000_host_days"], 0, 1e9)
    job = {name: options[name] for name in ("devices", "pipeline", "schedule", "compute_s", "find_s", "restart_s")}
    with in_words_of(options):
        return StragglerScenario(
            replace(spread_of(machine), **given),
            devices_per_host=machine.devices_per_host,
            tensor=options["tensor"] or min(machine.devices_per_host, options["devices"]),
            chunks=options["chunks"] or (1 if options["schedule"] == "1f1b" else 2),
            micro_batches=options["micro_batches"] or options["pipeline"],
            slow_per_host_day=options["slow_per_1000_host_days"] / 1000,
            **job,
        )


def _show(question: StragglerScenario, rows: Sequence[Waits], as_json: bool, html: Path | None) -> None:
    from phalanx.cli.tables import make_console, print_page_path
    from phalanx.simulate.straggler_report import stragglers_json, stragglers_text

    if html is not None:
        from phalanx.figures.pages.page_blocks import write_page
        from phalanx.simulate.straggler_report import stragglers_figures, stragglers_sections

        sections = stragglers_sections(question, rows)
        write_page(html, "Waiting for the slowest", sections, stragglers_figures(rows))
    if as_json:
        click.echo(json.dumps(stragglers_json(question, rows), indent=1, allow_nan=False))
        return
    console = make_console()
    console.print(stragglers_text(question, rows), highlight=False)
    print_page_path(console, html)
