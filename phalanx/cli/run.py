"""`phalanx run`: keep any torchrun-style script running. Torch-free."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from phalanx.run.config import load_job
from phalanx.run.driver.main import drive
from phalanx.run.flags import read_flags
from phalanx.run.people.hub import Told
from phalanx.run.people.source import Source

_OURS = {"--hosts": True, "--spares": True, "--workers-per-host": True, "--folder": True, "--job": True, "--set": True}
_COLOURS = {"info": "default", "warning": "yellow", "error": "bold red", "good": "green"}


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
    console = Console(stderr=True)
    console.print(f"job {escape(config.job_name)}: {config.hosts} hosts, folder {escape(str(config.run_folder))}")
    sys.exit(drive(config, lambda source: tell_on(source, console)))


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


async def tell_on(source: Source, console: Console) -> None:
    """Tell a person at a terminal what the driver says, line by line."""
    async for item in source.follow(0):
        if isinstance(item, Told):
            clock = time.strftime("%H:%M:%S", time.localtime(item.unix_s))
            about = f"incident {item.incident}: " if item.incident else ""
            text = escape(f"{about}{item.text}")
            console.print(f"[dim]{clock}[/dim] [{_COLOURS[item.level]}]{text}[/]", highlight=False)
