"""A layout as text: which rank sits where, and which groups it belongs to. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from phalanx.core.layout import AXES, Axis, Layout

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
