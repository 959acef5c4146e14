"""`phalanx checkpoint`: look at checkpoints, compare, convert and delete them.

Nothing is imported but names of commands, so that those which need no torch do not load it.
"""

from __future__ import annotations

from typing import Any

import click

from phalanx.cli.options import LazyGroup
from phalanx.core.errors import UserError

_LAZY = {
    "ls": ("phalanx.cli.checkpoint_list_and_prune:ls_command", "Show the checkpoints of RUN, newest first."),
    "show": (
        "phalanx.cli.checkpoint_show:show_command",
        "Show what a checkpoint holds: tensors, layout, size, health.",
    ),
    "verify": ("phalanx.cli.checkpoint_show:verify_command", "Hold every byte of a checkpoint against its checksum."),
    "diff": ("phalanx.cli.checkpoint_diff:diff_command", "Compare two checkpoints; exit status 1 if they differ."),
    "convert": (
        "phalanx.cli.checkpoint_convert:convert_command",
        "Into other files or dtypes, from plain DCP, from and to Hugging Face.",
    ),
    "keep": (
        "phalanx.cli.checkpoint_list_and_prune:keep_command",
        "Start the process that keeps snapshots of RUN in memory here.",
    ),
    "prune": (
        "phalanx.cli.checkpoint_list_and_prune:prune_command",
        "Delete checkpoints of RUN that are not to be kept.",
    ),
}
_ALIASES = {  # former names, which go on working and are not shown
    "list": _LAZY["ls"],
    "inspect": _LAZY["show"],
    "export-hf": ("phalanx.cli.checkpoint_convert:export_command", ""),
    "import-hf": ("phalanx.cli.checkpoint_convert:import_command", ""),
}


class _Group(LazyGroup):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _ALIASES:
            return LazyGroup(lazy=_ALIASES).get_command(ctx, cmd_name)
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; what storage refuses becomes one line."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except OSError as error:
            problem = f"{error.strerror}: {error.filename}" if error.filename else str(error) or type(error).__name__
            cure = "check the path or URL, the rights (for S3: AWS_…), and the network"
            raise UserError(f"storage refuses ({problem})", cure=cure) from error


@click.group(cls=_Group, lazy=_LAZY)
def command() -> None:
    """List, show, verify, compare, convert and prune checkpoints. No GPU is needed, and little memory.

    RUN is a run folder or a folder of checkpoints, PATH one of them or a checkpoint itself.
    """
