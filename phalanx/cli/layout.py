"""A layout for a person to read: what was chosen and why, which rank sits where, what it holds, when it waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.console import Group as Lines
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.cli.tables import make_table
from phalanx.core import units
from phalanx.core.layout import AXES, Axis, Layout
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.pipeline.timeline import draw
from phalanx.train.derived.run_layout import Spread, Stages, axes_text

_WIDEST_DRAWING = 140
_DRAWING_IN_A_PIPE = 100
_OF_MEMORY = "how much memory ranks will have is not known here; where it is short, phalanx train takes another"


def spread_text(spread: Spread, sequence_length: int, console: Console) -> RenderableType:
    """Everything about a layout of several ranks.

    Args:
        sequence_length: tokens.
        console: whose width decides how much of a schedule is drawn.
    """
    parts: list[RenderableType] = [_figures(spread, sequence_length), "", _heading("where each rank sits")]
    parts.append(draw_layout(spread.config.layout, spread.ranks_per_host))
    if spread.stages is not None:
        width = min(console.width, _WIDEST_DRAWING) if console.width < 1_000 else _DRAWING_IN_A_PIPE
        parts += ["", _heading("pipeline stages"), _stages_table(spread.stages), *_balance(spread.stages)]
        parts += ["", _heading("pipeline schedule"), draw(spread.stages.table, width=width, markup=True)]
    return Group(*parts)


def keys_of(config: ParallelConfig) -> str:
    """The axes of a layout as settings, to be copied: ``parallel.shard=2 parallel.tensor=2``."""
    keys = [f"parallel.{axis}={getattr(config, axis)}" for axis in AXES if getattr(config, axis) > 1]
    return " ".join([*keys, *([f"parallel.zero={config.zero}"] if config.shard * config.context > 1 else [])])


def _figures(spread: Spread, sequence_length: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(spread, sequence_length):
        table.add_row(name, escape(text))
    return table


def _rows(spread: Spread, sequence_length: int) -> Iterator[tuple[str, str]]:
    layout = spread.config.layout
    yield "layout", f"{layout.world_size:,} ranks: {axes_text(layout)}"
    if spread.choice.reasons:
        unknown = [_OF_MEMORY] if spread.available_bytes is None else []
        yield from zip(["why", *[""] * 9], [*spread.choice.reasons, *unknown], strict=False)
        yield "same as", keys_of(spread.config)
    yield "batch", _batch(spread, sequence_length)
    if spread.held_bytes:
        yield from _memory(spread)


def _batch(spread: Spread, sequence_length: int) -> str:
    samples = _samples(spread)
    if not spread.micro_batch:
        return f"{samples}, in micro-batches that are chosen when the run starts (train.micro_batch = 0)"
    count = spread.share // spread.micro_batch
    return f"{samples}: {count} micro-batch{'es' * (count > 1)} of {spread.micro_batch} x {sequence_length} tokens"


def _samples(spread: Spread) -> str:
    """How many sequences of a step each rank has."""
    copies = spread.config.replicate * spread.config.shard
    sequences = f"{spread.share} sequence{'s' * (spread.share > 1)}"
    if copies == 1:
        return f"{sequences} a step, the same on all ranks"
    return f"{sequences} a step on each of {copies:,} data-parallel ranks"


def _memory(spread: Spread) -> Iterator[tuple[str, str]]:
    held, whole = sum(spread.held_bytes.values()), sum(spread.whole_bytes.values())
    fullest = "the fullest rank" if spread.config.pipeline > 1 else "each rank"
    yield "memory", f"{units.size(held)} on {fullest}: {_sizes(spread.held_bytes)}"
    room = "" if spread.available_bytes is None else f"; {units.size(spread.available_bytes)} to be had here for each"
    yield "", f"{units.size(whole)} in a single process; activations come on top{room}"


def _sizes(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {units.size(size)}" for name, size in parts.items())


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


def _balance(stages: Stages) -> list[str]:
    """How even the stages are, and what to do."""
    uneven = stages.imbalance
    if uneven < 0.005:
        return ["all cost the same"]
    idle = uneven / (1 + uneven)
    line = f"the most expensive is {uneven:.0%} above the mean: ranks wait {idle:.0%} of the time besides the bubble"
    return [line, *([stages.cure] if stages.cure else [])]


def _heading(text: str) -> str:
    return f"[bold]{text}[/]"


_SHOWN_HOSTS = 8
_SHOWN_GROUPS = 4
_WHY: dict[Axis, str] = {
    "tensor": "every matrix split; gather and scatter in every block",
    "context": "every sequence split; keys and values exchanged in attention",
    "shard": "other samples; state split, weights gathered, gradients scattered",
    "replicate": "other samples; gradients added once a step",
    "pipeline": "other layers; activations sent from stage to stage",
}


def draw_layout(layout: Layout, ranks_per_host: int) -> RenderableType:
    """Hosts with their ranks and coordinates, then the groups of every axis.

    Args:
        ranks_per_host: hosts are filled with this many ranks in order.
    """
    if layout.world_size == 1:
        return "1 rank: nothing is spread"
    used = [axis for axis in AXES if getattr(layout, axis) > 1]
    title = f"{layout.world_size:,} ranks, {layout}; each as rank({','.join(used)})"
    return Lines(title, _Hosts(layout, ranks_per_host, used), "", _groups(layout, ranks_per_host))


def ranks_text(ranks: Sequence[int]) -> str:
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
                yield Text.assemble((name.ljust(label), "bold"), *self._spaced(cells, size))
        if len(hosts) > len(shown):
            yield Text(f"… and {len(hosts) - len(shown):,} hosts more")

    def _place(self, rank: int) -> Text:
        place = self.layout.coordinates(rank)
        return Text.assemble(str(rank), (f"({','.join(str(getattr(place, axis)) for axis in self.used)})", "dim"))

    @staticmethod
    def _spaced(cells: Sequence[Text], size: int) -> Iterator[Text]:
        for cell in cells[:-1]:
            yield cell + Text(" " * (size - len(cell.plain)))
        yield cells[-1]


def _groups(layout: Layout, ranks_per_host: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("axis", "groups", "hosts", "ranks", "its members have"):
        table.add_column(column, no_wrap=column in ("axis", "groups", "hosts"))
    for axis in reversed(AXES):
        if getattr(layout, axis) == 1:
            continue
        groups = layout.groups([axis])
        hosts = max(len({rank // ranks_per_host for rank in group}) for group in groups[:1] + groups[-1:])
        shown = "  ".join(ranks_text(group) for group in groups[:_SHOWN_GROUPS])
        more = " …" if len(groups) > _SHOWN_GROUPS else ""
        table.add_row(axis, f"{len(groups):,} of {len(groups[0]):,}", f"{hosts:,}", shown + more, _WHY[axis])
    return table
