"""`phalanx run`: keep any torchrun-style script running. Torch-free."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from phalanx.run.config import RunConfig, load_job
from phalanx.run.decide import actions
from phalanx.run.decide.actions import Action
from phalanx.run.driver.main import drive
from phalanx.run.driver.now import Now
from phalanx.run.flags import read_flags

_OURS = {"--hosts": True, "--spares": True, "--workers-per-host": True, "--folder": True, "--job": True, "--set": True}
_COLOURS = {"info": "default", "warning": "yellow", "error": "bold red"}


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS] [--] SCRIPT [ARGUMENTS]…")
def command(arguments: tuple[str, ...]) -> None:
    """Run SCRIPT on several hosts, and keep it running: what dies, hangs or slows is found and replaced.

    \b
    --hosts N             hosts that take part
    --spares N            hosts kept ready beside those
    --workers-per-host N  ranks on each
    --folder PATH         run folder
    --job FILE            job file, TOML
    --set KEY=VALUE       one setting of the job file, such as run.policy.max_restarts=3

    torchrun's flags are understood too.
    """
    flags = read_flags(arguments, os.environ, _OURS)
    changes = dict(flags.changes)
    job, overrides = _ours(flags.ours, changes)
    for note in flags.notes:
        click.echo(note, err=True)
    loaded = load_job(job, overrides, changes)
    config = loaded.value.run
    if config.backend == "local" and loaded.origin("run.policy.joining_check") == "default":
        # One machine is one host as far as its hardware goes: no need to measure it once for each executor.
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"joining_check": "passive"})})
    sys.exit(drive(config, lambda config: Teller(Console(stderr=True), config)))


def _ours(words: list[str], changes: dict[str, object]) -> tuple[Path | None, list[str]]:
    """Our own options: into `changes`; and the job file, and single settings."""
    names = {"--hosts": "run.hosts", "--spares": "run.spares", "--workers-per-host": "run.workers_per_host"}
    job, overrides = None, []
    for flag, value in zip(words[::2], words[1::2], strict=True):
        if flag == "--job":
            job = Path(value)
        elif flag == "--set":
            overrides.append(value)
        elif flag == "--folder":
            changes["run.folder"] = value
        else:
            changes[names[flag]] = int(value) if value.isdecimal() else value
    return job, overrides


class Teller:
    """Tells a person at a terminal."""

    def __init__(self, console: Console, config: RunConfig) -> None:
        self._console = console
        self._console.print(
            f"job {escape(config.job_name)}: {config.hosts} hosts, folder {escape(str(config.run_folder))}"
        )

    def tell(self, action: Action, at: Now) -> None:
        """One line."""
        clock = time.strftime("%H:%M:%S", time.localtime(at.unix_s))
        match action:
            case actions.Alert():
                colour, text = _COLOURS[action.level], action.text
            case actions.OpenIncident():
                colour, text = "yellow", f"incident {action.number}: {action.text} (seen by {action.seen_by})"
            case actions.AddToIncident():
                colour, text = "default", f"incident {action.number}: {action.by}: {action.text}"
            case actions.CloseIncident():
                colour, text = "green", f"incident {action.number} is over: {action.text}"
            case _:
                return
        self._console.print(f"[dim]{clock}[/dim] [{colour}]{escape(text)}[/{colour}]", highlight=False)
