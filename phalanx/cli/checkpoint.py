"""`phalanx checkpoint`: look at checkpoints and verify them, without torch; convert them (phalanx.cli.huggingface)."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from phalanx.checkpoint.format.manifest import DamagedCheckpointError, Manifest
from phalanx.checkpoint.format.verify import examine
from phalanx.checkpoint.storage.folder import locate
from phalanx.cli.lazy import LazyGroup
from phalanx.cli.tables import make_console, make_table
from phalanx.core import units

_LAZY = {
    "export-hf": (
        "phalanx.cli.huggingface:export_command",
        "Write the newest checkpoint of RUN as a Hugging Face folder.",
    ),
    "import-hf": (
        "phalanx.cli.huggingface:import_command",
        "Write a config that trains on from a Hugging Face folder.",
    ),
}


@click.group(cls=LazyGroup, lazy=_LAZY)
def command() -> None:
    """List, inspect and verify checkpoints; convert from and to Hugging Face."""


@command.command("list")
@click.argument("run", type=click.Path(path_type=Path))
def list_command(run: Path) -> None:
    """Show the checkpoints of RUN, newest first.

    Sizes of files are checked, contents are not (see verify).
    """
    table = make_table(
        "checkpoint", "step", "written", "size", "attempt", "config", "torch", right=(1, 3, 4), whole=(0,)
    )
    for path in locate(run):
        try:
            m = examine(path, checksums=False)
        except DamagedCheckpointError as damage:
            table.add_row(path.name, "", f"[red]damaged: {escape(damage.reason)}[/red]")
            continue
        facts = (units.size(m.size_bytes), str(m.attempt), m.config_sha256[:8], m.torch_version)
        table.add_row(path.name, str(m.step), m.created[:16].replace("T", " "), *map(escape, facts))
    make_console().print(table)


@command.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--config", is_flag=True, help="Print the resolved config it was written with, as JSON, and nothing else."
)
@click.option(
    "--state", is_flag=True, help="Print the saved state (position in the data …), as JSON, and nothing else."
)
def inspect_command(path: Path, config: bool, state: bool) -> None:
    """Show what the checkpoint PATH holds; of a run, its newest."""
    path = locate(path)[0]
    manifest = examine(path, checksums=False)
    if config or state:
        click.echo(json.dumps(manifest.config if config else manifest.state, indent=1, ensure_ascii=False))
        return
    console = make_console()
    console.print(tensor_table(manifest))
    console.print(summary_table(path, manifest))


@command.command("verify")
@click.argument("path", type=click.Path(path_type=Path))
def verify_command(path: Path) -> None:
    """Hold every byte of a checkpoint against its checksum.

    PATH is a checkpoint, or a run for all of its own. The exit status is 1 if one is damaged.
    """
    damaged = False
    for checkpoint in locate(path):
        try:
            manifest = examine(checkpoint)
        except DamagedCheckpointError as damage:
            damaged = True
            click.echo(f"{checkpoint.name}: damaged: {damage.reason}")
        else:
            click.echo(f"{checkpoint.name}: whole ({units.size(manifest.size_bytes)} in {len(manifest.files)} files)")
    if damaged:
        raise click.exceptions.Exit(1)


def tensor_table(manifest: Manifest) -> Table:
    """Name, dtype, shape, elements and bytes on disk of each tensor."""
    table = make_table("tensor", "dtype", "shape", "elements", "on disk", right=(3, 4))
    for name, tensor in manifest.tensors.items():
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        stored = units.size(sum(chunk.length for chunk in tensor.chunks))
        table.add_row(escape(name), escape(tensor.dtype), shape, f"{tensor.elements:,}", stored)
    return table


def summary_table(path: Path, manifest: Manifest) -> Table:
    """Where the checkpoint comes from and how large it is."""
    table = Table(title="checkpoint", title_justify="left", box=None, pad_edge=False, show_header=False)
    elements = sum(tensor.elements for tensor in manifest.tensors.values())
    rows = [
        ("folder", str(path)),
        ("step", f"{manifest.step:,}"),
        ("written", f"{manifest.created} by attempt {manifest.attempt}"),
        ("versions", f"phalanx {manifest.phalanx_version}, torch {manifest.torch_version}"),
        ("tensors", f"{len(manifest.tensors):,} with {units.count(elements)} elements"),
        ("size", f"{units.size(manifest.size_bytes)} in {len(manifest.files)} files"),
        ("config", f"{manifest.config_sha256} (SHA-256)"),
        ("state", ", ".join(manifest.state) if isinstance(manifest.state, dict) else type(manifest.state).__name__),
    ]
    for name, text in rows:
        table.add_row(name, escape(text))
    return table
