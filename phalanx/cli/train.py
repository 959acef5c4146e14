"""`phalanx train`: load the config, assemble the run, train, say how it went."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from phalanx.core.config import load
from phalanx.train.config import RunConfig
from phalanx.train.start import start


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
def command(config: Path, overrides: tuple[str, ...]) -> None:
    """Train a model as CONFIG says; KEY=VALUE pairs change single settings.

    A run that was stopped or killed goes on from its newest checkpoint when the same command is given again.
    """
    loaded = load(RunConfig, config, overrides)
    sys.exit(start(loaded.value, config, Console()))
