"""`phalanx explain`: every setting, where it came from, and what follows from it. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.cli.layout import spread_text
from phalanx.cli.tables import make_console, make_table
from phalanx.core import units
from phalanx.core.config import Loaded, load, walk
from phalanx.parallel.config import ParallelConfig
from phalanx.train.config import RunConfig
from phalanx.train.derived.kernel_choice import attention_lines, decide_compiling
from phalanx.train.derived.run_layout import Spread, explain_spread, ignored_settings, wanted_ranks
from phalanx.train.derived.run_numbers import Derived, check_early, derive, known_vocab_size


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
    check_early(loaded.value)
    vocab_size = loaded.value.model.vocab_size or known_vocab_size(loaded.value)
    spread = explain_spread(loaded.value, vocab_size, ranks_per_host) if wanted_ranks(loaded.value) > 1 else None
    console = make_console()
    console.print(settings_table(loaded, given=given, describe=describe))
    console.print()
    if vocab_size is None:
        console.print("What follows is not known before the text is read, of which the tokenizer is made.")
    else:
        console.print(derived_table(derive(loaded.value)))
    console.print()
    console.print(attention_table(loaded.value))
    _print_compiling(loaded.value, console)
    if spread is None:
        _print_ignored(loaded.value, loaded.value.parallel, console)
    else:
        explain_layout(loaded.value, spread, console)


def explain_layout(config: RunConfig, spread: Spread, console: Console) -> None:
    """Print how `config` is spread."""
    console.print()
    console.print(spread_text(spread, config.data.sequence_length, console), highlight=False)
    _print_ignored(config, spread.config, console)
    if not spread.held_bytes:
        console.print("Memory and stages are not known before the vocabulary is.")


def _print_compiling(config: RunConfig, console: Console) -> None:
    for device, on_gpu in (("CPU", False), ("GPU", True)):
        if config.train.device in ("auto", "cuda" if on_gpu else "cpu"):
            on, why = decide_compiling(config, on_gpu=on_gpu)
            how = why or ("layers are compiled" if on else "layers run as they are written")
            console.print(f"\nOn a {device} {how}.", highlight=False)


def _print_ignored(config: RunConfig, parallel: ParallelConfig, console: Console) -> None:
    train = config.train
    lines = [*ignored_settings(parallel), *train.ignored()]
    if train.offload and train.device == "cpu":
        lines.append(f"train.offload = {train.offload:g} has no effect: activations are on the host already")
    for line in lines:
        console.print(f"\n{line}", style="yellow", markup=False, highlight=False)


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


def attention_table(config: RunConfig) -> Table:
    """By which kernels the layers attend, on each kind of device that the settings allow, and why."""
    table = Table(title="attention", title_justify="left", box=None, pad_edge=False, show_header=False)
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    for device in devices:
        if config.train.device in ("auto", device):
            for line in attention_lines(config, device):
                table.add_row("GPU" if device == "cuda" else "CPU", *map(escape, line))
    return table


def _text(value: object) -> str:
    """A value as TOML has it, to be copied into a config; what JSON has of strings, numbers and lists is TOML too."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False, default=str)
