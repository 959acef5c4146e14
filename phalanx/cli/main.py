"""The `phalanx` command: finds the subcommand's module by name, so that help never imports what it does not show."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from phalanx import __version__
from phalanx.core.errors import UserError

# Subcommand -> one line of help. The code lies in `phalanx.cli.<name>`, in an object called `command`.
COMMANDS: dict[str, str] = {
    "train": "Train a model: phalanx train CONFIG.toml key=value …",
    "explain": "Print every setting of a config, where it came from, and what follows from it.",
    "data": "Prepare text for training and look at what was prepared.",
    "generate": "Sample text from a trained model.",
    "evaluate": "Loss, perplexity and bits per byte on held-out text.",
    "checkpoint": "List, inspect and verify checkpoints; convert from and to Hugging Face.",
}


class LazyGroup(click.Group):
    """A click group whose subcommands are imported only when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Subcommands in the order in which a user meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of `cmd_name`."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"phalanx.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="phalanx")
def group() -> None:
    """Train large language models on one laptop core or on thousands of GPUs with the same code."""


def main(arguments: list[str] | None = None) -> Any:
    """Entry point: a `UserError` becomes one line on stderr and exit status 2."""
    try:
        return group(args=arguments, prog_name="phalanx")
    except UserError as error:
        click.echo(click.style("error: ", fg="red", bold=True) + str(error), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
