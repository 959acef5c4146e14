"""`phalanx checkpoint keep`: start the keeper of this host before the run, where the run cannot take it along."""

from __future__ import annotations

import os
from pathlib import Path

import click

from phalanx.checkpoint.keeper.contract import KeeperLostError
from phalanx.checkpoint.keeper.start import address_for, ensure_keeper, until_ended
from phalanx.core.errors import UserError


@click.command("keep")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--folder", default="", help="checkpoint.folder of the run, where that is set.")
@click.option(
    "--ttl", "ttl_s", type=click.FloatRange(min=0, min_open=True), default=1800.0, show_default=True, help="Seconds."
)
@click.option("--wait", is_flag=True, help="Return when the keeper ends, so that the job step it is in goes on.")
def keep_command(run: Path, folder: str, ttl_s: float, wait: bool) -> None:
    """Start the process that keeps snapshots of RUN in the memory of this host, if there is none.

    `phalanx train` does so by itself. Where what it starts ends with it (a Slurm step), start it in a step of its own.
    It ends when the run has ended well, or when no rank has been there for --ttl seconds.
    """
    address = address_for(folder or str(run / "checkpoints"), os.environ)
    try:
        ensure_keeper(address, ttl_s=ttl_s)
    except (KeeperLostError, OSError) as error:
        raise UserError(f"no keeper can be started ({error})", cure="see to that", value=str(address)) from error
    click.echo(f"snapshots of {run} are kept by the process that listens at {address}")
    if wait:
        until_ended(address)
