"""`phalanx alerts`: try who hears of trouble, list what was reported, print rules and a board. Needs no torch."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib import resources
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from phalanx.cli.options import AS_JSON
from phalanx.cli.tables import make_table
from phalanx.core.errors import UserError

_EXAMPLES = """\b
Examples:
  phalanx alerts test night.toml
  phalanx alerts test night.toml alerts.webhook=env:HOOK
  phalanx alerts list runs/night
  phalanx alerts rules > /etc/prometheus/phalanx.yml
  phalanx alerts board > phalanx-board.json
"""

_COLOURS = {"error": "red", "warning": "yellow", "info": "green"}
_TRY_S = 60.0


@click.group(epilog=_EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Try the receivers of [alerts], list what was reported, print rules for Prometheus and a board for Grafana."""


@command.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
def test(config: Path, overrides: tuple[str, ...]) -> int:
    """Send a message to everybody whom [alerts] of CONFIG names, and say who took it.

    The exit status is 1 where one did not.
    """
    from phalanx.core.config import load
    from phalanx.telemetry.alerts.alert_episodes import Subject
    from phalanx.telemetry.alerts.alert_receivers import Outbox, receivers_of
    from phalanx.telemetry.alerts.alert_rules import Verdict
    from phalanx.train.config import RunConfig
    from phalanx.train.derived.run_numbers import default_folder

    loaded = load(RunConfig, config, overrides).value
    receivers = receivers_of(loaded.alerts, os.environ)
    if not receivers:
        cure = "set alerts.webhook, alerts.urls or alerts.command"
        raise UserError("names nobody to send alerts to", cure=cure, value=str(config))
    folder = default_folder(loaded, config).absolute()
    subject = Subject(folder.name, folder, platform.node(), loaded.alerts.link)
    verdict = Verdict("firing", "this is a test: alerts of this run arrive here", {"step": 0, "test": True})
    found: dict[str, str] = {}
    outbox = Outbox(receivers, lambda alert, name, problem: found.update({name: problem}), pauses_s=(1.0,))
    outbox.send(subject.alert(0, "finished", verdict, time.time()))
    outbox.close(_TRY_S)
    for receiver in receivers:
        problem = found.get(receiver.name, f"it did not answer within {_TRY_S:g} s")
        click.echo(f"{receiver.name}: {problem or 'delivered'}")
    return int(any(found.get(receiver.name, "-") for receiver in receivers))


@command.command("list")
@click.argument("run", type=click.Path(path_type=Path))
@AS_JSON
def list_alerts(run: Path, as_json: bool) -> None:
    """What was reported of the run in the folder RUN, the oldest first."""
    from phalanx.telemetry.alerts.alert_episodes import read_alerts

    found = read_alerts(run)
    if as_json:
        click.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    console = Console(emoji=False)
    if not found:
        console.print("nothing was reported", highlight=False)
        return
    table = make_table("when", "kind", "step", "what", "sent to", right=(2,))
    for alert in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(alert["unix_s"]))
        step = "" if alert["step"] is None else f"{alert['step']:,}"
        sent = ", ".join(_sent(each) for each in alert["sent"])
        cells = [when, alert["kind"], step, alert["title"], sent]
        table.add_row(*map(escape, cells), style=_COLOURS.get(alert["severity"], ""))
    console.print(table)


def _sent(each: dict[str, Any]) -> str:
    problem = each.get("problem")
    return f"{each['to']} ({problem})" if problem else str(each["to"])


@command.command()
def rules() -> None:
    """Print alert rules for Prometheus."""
    click.echo(_shipped("rules.yml"), nl=False)


@command.command()
def board() -> None:
    """Print a board for Grafana, to be imported there."""
    click.echo(_shipped("board.json"), nl=False)


def _shipped(name: str) -> str:
    return resources.files("phalanx.telemetry.alerts").joinpath("prometheus", name).read_text(encoding="utf-8")
