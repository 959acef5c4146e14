"""`phalanx explain`: every setting, where it came from, and what follows from it. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.core import units
from phalanx.core.config import Loaded, load, walk
from phalanx.core.errors import UserError
from phalanx.train.config import RunConfig
from phalanx.train.derived import Derived, derive


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--given", is_flag=True, help="Leave out the settings that have their default.")
@click.option("--describe", is_flag=True, help="Also say what each setting is, with its unit.")
def command(config: Path, overrides: tuple[str, ...], given: bool, describe: bool) -> None:
    """Print every setting of CONFIG, where its value came from, and what follows from it."""
    loaded = load(RunConfig, config, overrides)
    console = Console()
    console.print(settings_table(loaded, given=given, describe=describe))
    try:
        console.print(derived_table(derive(loaded.value)))
    except UserError as error:
        console.print(f"Derived figures are not known yet: {error}", markup=False)


def settings_table(loaded: Loaded[RunConfig], *, given: bool, describe: bool) -> Table:
    """Key, value and origin of every setting, and what it is."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold", no_wrap=column == "setting")
    if describe:
        table.add_column("what it is", overflow="fold")
    for key, value, field in walk(loaded.value):
        origin = loaded.origin(key)
        if given and origin == "default":
            continue
        cells = [key, _text(value), origin, field.description or ""]
        table.add_row(*map(escape, cells[: 4 if describe else 3]), style="dim" if origin == "default" else "")
    return table


def derived_table(derived: Derived) -> Table:
    """What the settings imply."""
    table = Table(title="what follows", title_justify="left", box=None, pad_edge=False, show_header=False)
    rows = [
        ("parameters", f"{derived.parameters:,}"),
        ("tokens per step", f"{derived.tokens_per_step:,}"),
        ("steps", f"{derived.steps:,}"),
        ("tokens in all", f"{derived.total_tokens:,} ({derived.total_tokens / derived.parameters:.1f} per parameter)"),
        ("FLOPs per token", f"{units.count(derived.flops_per_token)} (forward and backward)"),
        ("FLOPs in all", f"{derived.total_flops:.3g}"),
    ]
    for name, text in rows:
        table.add_row(name, text)
    return table


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
