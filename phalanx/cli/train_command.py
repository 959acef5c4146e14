"""`phalanx train`: load the config, assemble the run, train, say how it went."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from rich.console import Console

from phalanx.api.training import load_config
from phalanx.core.errors import UserError
from phalanx.launch.environment import worker_environment
from phalanx.plan.hardware.cluster import known_cluster
from phalanx.train.config import RunConfig
from phalanx.train.derived.run_layout import wanted_ranks
from phalanx.train.predicted_cost import Expected
from phalanx.train.start import start


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option(
    "--cluster",
    metavar="NAME|FILE",
    envvar="PHALANX_CLUSTER",
    help="Predict the run for it, and compare; else for this machine, where it is calibrated or its GPUs are known.",
)
def command(config: Path, overrides: tuple[str, ...], cluster: str | None) -> None:
    """Train a model as CONFIG says; KEY=VALUE pairs change single settings.

    A run that was stopped or killed goes on from its newest checkpoint when the same command is given again.
    """
    loaded, console = load_config(config, overrides), Console(emoji=False)
    expected = _expected(loaded, config.stem, cluster, console)
    sys.exit(start(loaded, config, console, expected))


def _expected(config: RunConfig, name: str, asked: str | None, console: Console) -> Expected | None:
    """What a step is predicted to cost, on rank 0; None where no cluster is known."""
    worker = worker_environment()
    cluster = asked or known_cluster(os.environ)
    if cluster is None or (worker is not None and worker.rank > 0):
        return None
    from phalanx.api.planning import (
        expected_of,  # not before: it imports NumPy, which a run's launcher does without
    )

    devices = worker.world_size if worker is not None else wanted_ranks(config)
    try:
        return expected_of(config, name, cluster, devices)
    except UserError as error:
        if asked:
            raise
        problem = str(error)
    except Exception as error:  # whatever is wrong with the planner, training can do without
        problem = f"{type(error).__name__}: {error}"
    console.print(f"no prediction: {problem}", markup=False, highlight=False, soft_wrap=True)
    return None
