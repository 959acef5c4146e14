"""`phalanx explain`: every setting, where it came from, and what follows from it; how several ranks are spread."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.cli.tables import make_console, make_table
from phalanx.core import units
from phalanx.core.config import Loaded, load, walk
from phalanx.core.layout import AXES, Axis, Layout
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.pipeline.split import imbalance
from phalanx.parallel.pipeline.timeline import draw
from phalanx.train.config import RunConfig
from phalanx.train.derived.kernel_choice import attention_lines, decide_compiling
from phalanx.train.derived.run_layout import (
    Spread,
    Stages,
    axes_text,
    explain_spread,
    ignored_settings,
    wanted_ranks,
)
from phalanx.train.derived.run_numbers import check_early, derive, known_vocab_size


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
    console.print(_settings_table(loaded, given=given, describe=describe))
    console.print()
    if vocab_size is None:
        console.print("What follows is not known before the text is read, of which the tokenizer is made.")
    else:
        console.print(_derived_table(loaded.value))
    console.print()
    console.print(_attention_table(loaded.value))
    for device, on_gpu in (("CPU", False), ("GPU", True)):
        if loaded.value.train.device in ("auto", "cuda" if on_gpu else "cpu"):
            on, why = decide_compiling(loaded.value, on_gpu=on_gpu)
            how = why or ("layers are compiled" if on else "layers run as they are written")
            console.print(f"\nOn a {device} {how}.", highlight=False)
    if spread is None:
        _print_ignored(loaded.value, loaded.value.parallel, console)
        return
    console.print()
    console.print(_spread_text(spread, loaded.value.data.sequence_length, console), highlight=False)
    _print_ignored(loaded.value, spread.choice.config, console)
    if not spread.held_bytes:
        console.print("Memory and stages are not known before the vocabulary is.")


def _print_ignored(config: RunConfig, parallel: ParallelConfig, console: Console) -> None:
    train = config.train
    lines = [*ignored_settings(parallel), *train.ignored()]
    if train.offload and train.device == "cpu":
        lines.append(f"train.offload = {train.offload:g} has no effect: activations are on the host already")
    for line in lines:
        console.print(f"\n{line}", style="yellow", markup=False, highlight=False)


def _settings_table(loaded: Loaded[RunConfig], *, given: bool, describe: bool) -> Table:
    table = make_table("setting", "value", "from", *(["what it is"] if describe else []), whole=(0,))
    for key, value, field in walk(loaded.value):
        origin = loaded.origin(key)
        if given and origin == "default":
            continue
        # To be copied into a config: what JSON has of strings, numbers and lists is TOML too.
        text = "unset" if value is None else json.dumps(value, ensure_ascii=False, default=str)
        cells = [key, text, origin, field.description or ""]
        table.add_row(*map(escape, cells[: 4 if describe else 3]), style="dim" if origin == "default" else "")
    return table


def _derived_table(config: RunConfig) -> Table:
    derived = derive(config)
    table = Table(title="what follows", title_justify="left", box=None, pad_edge=False, show_header=False)
    per_parameter = derived.total_tokens / derived.parameters
    table.add_row("parameters", f"{derived.parameters:,}")
    table.add_row("tokens per step", f"{derived.tokens_per_step:,}")
    table.add_row("steps", f"{derived.steps:,}")
    table.add_row("tokens in all", f"{derived.total_tokens:,} ({per_parameter:.1f} per parameter)")
    table.add_row("FLOPs per token", f"{units.count(derived.flops_per_token)} (forward and backward)")
    table.add_row("FLOPs in all", f"{derived.flops_per_token * derived.total_tokens:.3g}")
    return table


def _attention_table(config: RunConfig) -> Table:
    """By which kernels the layers attend, on each kind of device that the settings allow, and why."""
    table = Table(title="attention", title_justify="left", box=None, pad_edge=False, show_header=False)
    devices: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    for device in devices:
        if config.train.device in ("auto", device):
            for line in attention_lines(config, device):
                table.add_row("GPU" if device == "cuda" else "CPU", *map(escape, line))
    return table


_WIDEST_DRAWING = 140
_DRAWING_IN_A_PIPE = 100
_OF_MEMORY = "how much memory ranks will have is not known here; where it is short, phalanx train takes another"


def _spread_text(spread: Spread, sequence_length: int, console: Console) -> RenderableType:
    """What was chosen and why, which rank sits where, what it holds, and when it waits."""
    parts: list[RenderableType] = [_figures(spread, sequence_length), "", "[bold]where each rank sits[/]"]
    parts.append(_drawing(spread.choice.config.layout, spread.ranks_per_host))
    if spread.stages is not None:
        width = min(console.width, _WIDEST_DRAWING) if console.width < 1_000 else _DRAWING_IN_A_PIPE
        uneven = imbalance(spread.stages.spans)
        balance = ["all cost the same"]
        if uneven >= 0.005:
            idle = f"ranks wait {uneven / (1 + uneven):.0%} of the time besides the bubble"
            balance = [f"the most expensive is {uneven:.0%} above the mean: {idle}"]
            balance += [spread.stages.cure] if spread.stages.cure else []
        parts += ["", "[bold]pipeline stages[/]", _stages_table(spread.stages), *balance]
        parts += ["", "[bold]pipeline schedule[/]", draw(spread.stages.table, width=width, markup=True)]
    return Group(*parts)


def _figures(spread: Spread, sequence_length: int) -> Table:
    config, layout = spread.choice.config, spread.choice.config.layout
    rows = [("layout", f"{layout.world_size:,} ranks: {axes_text(layout)}")]
    if spread.choice.reasons:
        unknown = [_OF_MEMORY] if spread.available_bytes is None else []
        rows += zip(["why", *[""] * 9], [*spread.choice.reasons, *unknown], strict=False)
        keys = [f"parallel.{axis}={getattr(config, axis)}" for axis in AXES if getattr(config, axis) > 1]
        zero = [f"parallel.zero={config.zero}"] if config.shard * config.context > 1 else []
        rows.append(("same as", " ".join([*keys, *zero])))  # settings, to be copied
    copies = config.replicate * config.shard
    samples = f"{spread.share} sequence{'s' * (spread.share > 1)} a step"
    samples += ", the same on all ranks" if copies == 1 else f" on each of {copies:,} data-parallel ranks"
    if spread.micro_batch:
        count = spread.share // spread.micro_batch
        batches = f"{count} micro-batch{'es' * (count > 1)} of {spread.micro_batch} x {sequence_length} tokens"
        rows.append(("batch", f"{samples}: {batches}"))
    else:
        chosen = "in micro-batches that are chosen when the run starts (train.micro_batch = 0)"
        rows.append(("batch", f"{samples}, {chosen}"))
    if spread.held_bytes:
        held, whole = sum(spread.held_bytes.values()), sum(spread.whole_bytes.values())
        fullest = "the fullest rank" if config.pipeline > 1 else "each rank"
        sizes = ", ".join(f"{name} {units.size(size)}" for name, size in spread.held_bytes.items())
        rows.append(("memory", f"{units.size(held)} on {fullest}: {sizes}"))
        available = spread.available_bytes
        room = "" if available is None else f"; {units.size(available)} to be had here for each"
        rows.append(("", f"{units.size(whole)} in a single process; activations come on top{room}"))
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, escape(text))
    return table


def _stages_table(stages: Stages) -> Table:
    table = make_table("stage", "pipeline rank", "layers", "share of the cost", right=(0, 1, 3))
    total = sum(span.flops_per_token for span in stages.spans)
    for number, span in enumerate(stages.spans):
        first, last = span.layers[0], span.layers[-1]
        held = [str(first) if first == last else f"{first}-{last}"]
        held += ["embedding"] * span.first + ["loss head"] * span.last
        rank = stages.table.placement.rank_of(number)
        table.add_row(str(number), str(rank), " + ".join(held), f"{span.flops_per_token / total:.1%}")
    return table


_SHOWN_HOSTS = 8
_SHOWN_GROUPS = 4
_WHY: dict[Axis, str] = {
    "tensor": "every matrix split; gather and scatter in every block",
    "context": "every sequence split; keys and values exchanged in attention",
    "shard": "other samples; state split, weights gathered, gradients scattered",
    "replicate": "other samples; gradients added once a step",
    "pipeline": "other layers; activations sent from stage to stage",
}


def _drawing(layout: Layout, ranks_per_host: int) -> RenderableType:
    """Hosts, filled in order, with their ranks and coordinates; then the groups of every axis."""
    if layout.world_size == 1:
        return "1 rank: nothing is spread"
    used = [axis for axis in AXES if getattr(layout, axis) > 1]
    title = f"{layout.world_size:,} ranks, {layout}; each as rank({','.join(used)})"
    return Group(title, _Hosts(layout, ranks_per_host, used), "", _groups(layout, ranks_per_host))


def _ranks_text(ranks: Sequence[int]) -> str:
    """``0-3`` for neighbours, ``0,2,4,6`` for few, ``0,8,…,56`` for many at equal distances."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{ranks[0]},{ranks[1]},…,{ranks[-1]}"


@dataclass(frozen=True)
class _Hosts:
    """Hosts with the ranks on each; ranks that do not fit side by side go on below, in rows of as many."""

    layout: Layout
    ranks_per_host: int
    used: Sequence[Axis]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        world, per_host = self.layout.world_size, self.ranks_per_host
        hosts = [range(first, min(first + per_host, world)) for first in range(0, world, per_host)]
        shown = hosts[:_SHOWN_HOSTS]
        label = len(f"host {len(shown) - 1}  ")
        size = max(len(self._place(rank).plain) for ranks in shown for rank in ranks) + 2
        rows = -(-per_host // max((options.max_width - label + 2) // size, 1))
        per_row = -(-per_host // rows)
        for number, ranks in enumerate(shown):
            for first in range(0, len(ranks), per_row):
                name = f"host {number}" if first == 0 else ""
                cells = [self._place(rank) for rank in ranks[first : first + per_row]]
                spaced = [cell + Text(" " * (size - len(cell.plain))) for cell in cells[:-1]]
                yield Text.assemble((name.ljust(label), "bold"), *spaced, cells[-1])
        if len(hosts) > len(shown):
            yield Text(f"… and {len(hosts) - len(shown):,} hosts more")

    def _place(self, rank: int) -> Text:
        place = self.layout.coordinates(rank)
        return Text.assemble(str(rank), (f"({','.join(str(getattr(place, axis)) for axis in self.used)})", "dim"))


def _groups(layout: Layout, ranks_per_host: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("axis", "groups", "hosts", "ranks", "its members have"):
        table.add_column(column, no_wrap=column in ("axis", "groups", "hosts"))
    for axis in reversed(AXES):
        if getattr(layout, axis) == 1:
            continue
        groups = layout.groups([axis])
        hosts = max(len({rank // ranks_per_host for rank in group}) for group in groups[:1] + groups[-1:])
        shown = "  ".join(_ranks_text(group) for group in groups[:_SHOWN_GROUPS])
        more = " …" if len(groups) > _SHOWN_GROUPS else ""
        table.add_row(axis, f"{len(groups):,} of {len(groups[0]):,}", f"{hosts:,}", shown + more, _WHY[axis])
    return table
