"""`phalanx detect all`: every judge on one run, a line each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from phalanx.cli.options import AS_JSON


@click.command("all")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--only", metavar="A,B", help="These judges only [all].")
@AS_JSON
def command(run: Path, only: str | None, as_json: bool) -> None:
    """Ask every judge about RUN, the folder of a run: one line for each.

    With --json each line is an object, as the judge's own command writes it. The exit status is 1 where one of them
    found something, 3 where none could say anything, else 0.
    """
    from phalanx.cli.tables import make_console, printable
    from phalanx.detect.judges import judge_all

    console = make_console()
    verdicts = []
    for verdict in judge_all(run, only.split(",") if only else ()):
        verdicts.append(verdict)
        if as_json:
            click.echo(json.dumps(verdict.as_json(), ensure_ascii=False))
            continue
        state, style = {0: ("well", "green"), 1: ("WRONG", "bold red"), 3: ("unknown", "yellow")}[verdict.exit_status]
        console.print(f"{verdict.judge:<11}", end="", highlight=False)
        console.print(f"{state:<8}", end="", style=style, highlight=False)
        console.print(printable(verdict.sentence), highlight=False, markup=False, soft_wrap=True)
    wrong = [verdict.judge for verdict in verdicts if verdict.detections]
    if wrong and not as_json:
        console.print(f"\nwhy, and what to do: phalanx detect {wrong[0]} {run}", highlight=False, markup=False)
    silent = [verdict.judge for verdict in verdicts if verdict.exit_status == 3]
    if silent and not as_json:
        text = f"\nnot judged, for want of evidence: {', '.join(silent)} ({len(silent)} of {len(verdicts)} judges)"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    statuses = {verdict.exit_status for verdict in verdicts}
    sys.exit(1 if 1 in statuses else 0 if 0 in statuses or not statuses else 3)
