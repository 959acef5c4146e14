"""`phalanx detect machines`: the faulty machine of a job, found in monitoring metrics. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.options import AS_JSON, FiniteRange

if TYPE_CHECKING:
    from phalanx.detect.detection import JudgeVerdict
    from phalanx.detect.minder.minder_policy import MinderPolicy
    from phalanx.detect.monitoring.metric_names import Names
    from phalanx.detect.monitoring.metric_table import MetricTable
    from phalanx.detect.monitoring.prometheus_source import PrometheusServer

_EXAMPLES = """\b
Examples:
  phalanx detect machines http://prometheus:9090
  phalanx detect machines metrics.parquet
  phalanx detect machines runs/night continuity_s=120
  phalanx detect machines http://prometheus:9090 --hosts h1,h2,h3,h4 --follow
"""


@click.command(epilog=_EXAMPLES)
@click.argument("source")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--policy", "policy_file", type=click.Path(path_type=Path), metavar="FILE", help="Numbers as TOML.")
@click.option(
    "--minutes", type=FiniteRange(0.1, 525_600), help="How far back; default: 15 of a server or a run, all of a file."
)
@click.option("--hosts", metavar="A,B…", help="Machines of the job; default: all that the source has.")
@click.option("--names", type=click.Path(path_type=Path), metavar="FILE", help="Names of series, as TOML.")
@click.option("--host-label", default="instance", show_default=True, help="Of a server: the label that names hosts.")
@click.option("--selector", default="", help='Of a server: further matchers, such as job="dcgm".')
@click.option("--scrape-s", type=FiniteRange(0.01, 86_400), default=1.0, show_default=True, help="Between scrapes.")
@click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE", help="A bearer token for the server.")
@click.option("--ca-file", type=click.Path(path_type=Path), metavar="FILE", help="Whoever signed its certificate.")
@click.option("--follow", is_flag=True, help="Go on as new samples come, until Ctrl-C; a line for each incident.")
@click.option(
    "--every", "every_s", type=FiniteRange(0.2, 86_400), default=5.0, show_default=True, help="Seconds between looks."
)
@AS_JSON
def command(
    source: str,
    overrides: tuple[str, ...],
    policy_file: Path | None,
    minutes: float | None,
    hosts: str | None,
    names: Path | None,
    host_label: str,
    selector: str,
    scrape_s: float,
    token_file: Path | None,
    ca_file: Path | None,
    follow: bool,
    every_s: float,
    as_json: bool,
) -> int:
    """Which machine of a job is faulty, by the monitoring metrics of all (Minder).

    SOURCE is the address of a Prometheus server, a Parquet or CSV file, or the folder of a run. Machines that differ
    from the others, and from what they were, for four minutes are named, with the metric that shows it, since when,
    how sure, and what kind of fault it may be. Numbers may be set: see `phalanx explain`'s words in
    docs/detect_machines.md.
    """
    from phalanx.cli.verdict_output import write_verdict
    from phalanx.core.config import load
    from phalanx.detect.minder.machine_judge import judge_machines
    from phalanx.detect.minder.minder_policy import MinderPolicy
    from phalanx.detect.monitoring.metric_names import load_names
    from phalanx.detect.monitoring.prometheus_source import PrometheusServer

    policy = load(MinderPolicy, policy_file, overrides).value
    server = None
    if source.startswith(("http://", "https://")):
        server = PrometheusServer(source, host_label, selector, scrape_s, token_file, ca_file=ca_file)
    chosen = tuple(one.strip() for one in hosts.split(",") if one.strip()) if hosts else None
    known = load_names(names) if names else None
    if minutes is None and Path(source).is_dir():
        minutes = 15.0

    def read(back_minutes: float | None, machines: tuple[str, ...] | None) -> MetricTable:
        return _read(source, back_minutes, machines, known, server)

    table = read(minutes, chosen)
    if chosen:
        _refuse_unknown(chosen, table)
    if not follow:
        return write_verdict(judge_machines(table, policy), as_json=as_json)
    return _follow(table, policy, read, every_s, as_json)


def _read(
    source: str,
    minutes: float | None,
    machines: tuple[str, ...] | None,
    names: Names | None,
    server: PrometheusServer | None,
) -> MetricTable:
    from phalanx.detect.monitoring.metric_sources import read_metrics

    return read_metrics(source, minutes=minutes, machines=machines, names=names, server=server)


def _refuse_unknown(chosen: tuple[str, ...], table: MetricTable) -> None:
    """A host that was asked for and has no samples: its name may be wrong."""
    from phalanx.core.errors import UserError

    without = [name for name, some in zip(table.machines, table.is_there, strict=True) if name in chosen and not some]
    if without:
        cure = "look at the names that the source has, or leave out hosts that are gone"
        raise UserError("there are no samples of these hosts", cure=cure, field="--hosts", value=", ".join(without))


def _follow(
    table: MetricTable,
    policy: MinderPolicy,
    read: Callable[[float, tuple[str, ...]], MetricTable],
    every_s: float,
    as_json: bool,
) -> int:
    from phalanx.cli.tables import printable
    from phalanx.detect.minder.following import FollowedJob, follow
    from phalanx.detect.minder.machine_judge import looked_at
    from phalanx.detect.minder.sample_coverage import outside_limits

    for words in outside_limits(table, table.metrics).values():
        click.echo(f"not judged: {printable(words)}", err=True)
    job = FollowedJob(table.only([one for one in table.metrics if one not in outside_limits(table, [one])]), policy)
    click.echo(f"following {looked_at(table)}", err=True)
    status = 0
    try:
        for one in follow(job, read, every_s):
            if not one.detections:
                click.echo(f"not judged: {printable('; '.join(one.abstains))}", err=True)
                continue
            status = 1
            click.echo(json.dumps(one.as_json(), ensure_ascii=False) if as_json else _line(one))
    except KeyboardInterrupt:
        pass
    return status


def _line(verdict: JudgeVerdict) -> str:
    """When it was found, who and what, and since when."""
    from phalanx.cli.tables import printable
    from phalanx.detect.detection import Onset

    (found,) = verdict.detections
    raised = str(Onset(float(found.figures["raised_unix_s"])))
    since = str(found.since)
    return printable(f"{raised}: {found.sentence}, since {since}" if since else f"{raised}: {found.sentence}")
