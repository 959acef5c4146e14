"""`phalanx detect offenders`: hosts that fail again and again."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from phalanx.cli.options import AS_JSON


@click.command("offenders")
@click.argument("places", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="HISTORY…")
@click.option(
    "--hosts", type=click.IntRange(1), metavar="N", help="Hosts that were watched, with those that had no incident."
)
@click.option(
    "--times-fleet", type=float, metavar="X", help="An offender's rate is at least so many times the fleet's (3)."
)
@click.option("--sure", type=float, metavar="P", help="With this probability (0.9).")
@AS_JSON
def command(
    places: tuple[Path, ...], hosts: int | None, times_fleet: float | None, sure: float | None, as_json: bool
) -> None:
    """Hosts that fail more often than chance would have it, by a history of incidents.

    HISTORY is a folder of jobs of `phalanx run` (their incidents), of runs (their telemetry), or a table, CSV or JSON,
    with the columns host, unix_s (or time) and kind.
    """
    from phalanx.cli.verdict_output import write_verdict
    from phalanx.core.errors import UserError
    from phalanx.detect.incident_history import read_histories
    from phalanx.detect.offenders import FleetHistory, OffenderPolicy, judge_offenders

    given = {"times_fleet": times_fleet, "sure": sure}
    policy = OffenderPolicy(**{name: value for name, value in given.items() if value is not None})
    history = FleetHistory(tuple(read_histories(places)), hosts, now_unix_s=time.time())
    named = len({incident.host for incident in history.incidents})
    if hosts is not None and hosts < named:
        cure = "count all hosts that were watched, with those that had no incident"
        raise UserError(f"is fewer than the {named:,} hosts of the history", cure=cure, field="--hosts", value=hosts)
    sys.exit(write_verdict(judge_offenders(history, policy), as_json=as_json))
