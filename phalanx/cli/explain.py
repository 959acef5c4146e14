"""`phalanx explain`: every setting, where it came from, and what follows from it. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.cli.layout import spread_text
from phalanx.cli.tables import make_console, make_table
from phalanx.core import units
from phalanx.core.config import Loaded, load, walk
from phalanx.core.errors import UserError
from phalanx.data.tokenizers.vocabulary import configured_vocab_size
from phalanx.parallel.config import ParallelConfig
from phalanx.train.config import RunConfig
from phalanx.train.derived.figures import Derived, derive
from phalanx.train.derived.layout import ignored_settings, wanted_ranks
from phalanx.train.derived.spread import explain_spread


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--given", is_flag=True, help="Leave out the settings that have their default.")
@click.option("--describe", is_flag=True, help="Also say what each setting is, with its unit.")
@click.option(
    "--ranks-per-host",
    type=click.IntRange(min=1),
    help="Ranks on each host, for drawing a layout and choosing one; all on one host where they are at most 8, else 8.",
)
def command(config: Path, overrides: tuple[str, ...], given: bool, describe: bool, ranks_per_host: int | None) -> None:
    """Print every setting of CONFIG, where its value came from, and what follows from it."""
    loaded = load(RunConfig, config, overrides)
    console = make_console()
    console.print(settings_table(loaded, given=given, describe=describe))
    console.print()
    try:
        console.print(derived_table(derive(loaded.value)))
    except UserError as error:
        console.print(f"Derived figures are not known yet: {error}", markup=False)
    if wanted_ranks(loaded.value) > 1:
        explain_layout(loaded.value, ranks_per_host, console)
    else:
        _print_ignored(loaded.value.parallel, console)


def explain_layout(config: RunConfig, ranks_per_host: int | None, console: Console) -> None:
    """Print how `config` is spread.

    Raises:
        UserError: the layout is impossible.
    """
    spread = explain_spread(config, _known_vocab_size(config), ranks_per_host)
    console.print()
    console.print(spread_text(spread, config.data.sequence_length, console), highlight=False)
    _print_ignored(spread.config, console)
    if not spread.held_bytes:
        console.print("Memory and stages are not known before the vocabulary is.")


def _print_ignored(config: ParallelConfig, console: Console) -> None:
    for line in ignored_settings(config):
        console.print(f"\n{line}", style="yellow", markup=False, highlight=False)


def _known_vocab_size(config: RunConfig) -> int | None:
    try:
        return config.model.vocab_size or configured_vocab_size(config.data.tokenizer)
    except UserError:
        return None


def settings_table(loaded: Loaded[RunConfig], *, given: bool, describe: bool) -> Table:
    """Key, value and origin of every setting, and what it is."""
    table = make_table("setting", "value", "from", *(["what it is"] if describe else []), whole=(0,))
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
    """A value as TOML has it, to be copied into a config; what JSON has of strings, numbers and lists is TOML too."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False, default=str)
