"""How verdicts of judges are shown: for people, or as one JSON object."""

from __future__ import annotations

import json

import click

from phalanx.cli.tables import make_console, printable
from phalanx.detect.detection import Detection, JudgeVerdict


def write_verdict(verdict: JudgeVerdict, *, as_json: bool, most: int = 8) -> int:
    """Print it; returns the exit status.

    Args:
        most: detections that are printed for people; JSON holds all.
    """
    if as_json:
        click.echo(json.dumps(verdict.as_json(), indent=1, ensure_ascii=False))
        return verdict.exit_status
    console = make_console()
    console.print(printable(verdict.sentence), highlight=False, markup=False, soft_wrap=True, style="bold")
    for number, found in enumerate(verdict.detections[:most]):
        if number:
            console.print(f"\n{printable(found.sentence)}", highlight=False, markup=False, soft_wrap=True, style="bold")
        for line in _details(found):
            console.print(f"  {printable(line)}", highlight=False, markup=False, soft_wrap=True)
    if (left := len(verdict.detections) - most) > 0:
        console.print(f"\n{left} more: --json lists all", highlight=False, markup=False, soft_wrap=True)
    if verdict.detections:
        for reason in verdict.abstains:
            console.print(f"not judged: {printable(reason)}", highlight=False, markup=False, soft_wrap=True)
    return verdict.exit_status


def _details(found: Detection) -> list[str]:
    since = str(found.since)
    lines = [f"what: {found.what}, confidence {found.confidence:.0%}{f', since {since}' if since else ''}"]
    lines += [f"why:  {reason}" for reason in found.why]
    lines += [f"next: {action}" for action in found.then]
    return lines
