"""The `phalanx` command: finds the subcommand's module by name, so that help never imports what it does not show."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from phalanx import __version__
from phalanx.cli.lazy import LazyGroup
from phalanx.core.errors import UserError

# Subcommand -> one line of help. The code lies in `phalanx.cli.<name>`, in an object called `command`.
COMMANDS: dict[str, str] = {
    "train": "Train a model: phalanx train CONFIG.toml key=value …",
    "run": "Keep any distributed script running: phalanx run --hosts 4 -- train.py …",
    "explain": "Print every setting of a config, where it came from, and what follows from it.",
    "data": "Prepare text for training and look at what was prepared.",
    "generate": "Sample text from a trained model.",
    "evaluate": "Loss, perplexity and bits per byte on held-out text.",
    "plan": "Know before: predict step time and memory, search the best layout for a cluster.",
    "simulate": "What if: networks, failures over months, slow ranks.",
    "check": "Test this host: processors, memory, GPUs, network, disks, clock and settings.",
    "checkpoint": "List, show, verify, compare, convert and prune checkpoints.",
}


@click.group(
    cls=LazyGroup,
    lazy={name: (f"phalanx.cli.{name}:command", help_line) for name, help_line in COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="phalanx")
def group() -> None:
    """Train large language models on one laptop core or on thousands of GPUs with the same code."""


def yield_idle_cores() -> None:
    """Let waiting OpenMP threads give up their core soon, unless the environment says otherwise.

    By default they spin for milliseconds at every barrier, and one other busy process on the machine slows a step on
    two cores by three to ten times. Must be called before torch loads its OpenMP library, which reads this once
    (docs/LOG.md has the measurement).
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: a `UserError` becomes one line on stderr and exit status 2."""
    yield_idle_cores()
    try:
        return group(args=arguments, prog_name="phalanx")
    except UserError as error:
        click.echo(click.style("error: ", fg="red", bold=True) + str(error), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
