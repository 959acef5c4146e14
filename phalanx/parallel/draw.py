"""A layout as text: which rank sits where, and which groups it belongs to. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table

from phalanx.core.layout import AXES, Axis, Layout

_SHOWN_HOSTS = 8
_SHOWN_GROUPS = 4
_WHY: dict[Axis, str] = {
    "tensor": "every matrix split; gather and scatter in every block",
    "context": "every sequence split; keys and values exchanged in attention",
    "shard": "other samples; weights gathered and gradients scattered once a step",
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
    title = f"{layout.world_size} ranks, {layout}; each as rank({','.join(used)})"
    return Lines(title, _hosts(layout, ranks_per_host, used), "", _groups(layout, ranks_per_host))


def ranks_text(ranks: Sequence[int]) -> str:
    """``0-3`` for neighbours, ``0,2,4,6`` for few, ``0,8,…,56`` for many at equal distances."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{ranks[0]},{ranks[1]},…,{ranks[-1]}"


def _hosts(layout: Layout, ranks_per_host: int, used: Sequence[Axis]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    hosts = [
        range(first, min(first + ranks_per_host, layout.world_size))
        for first in range(0, layout.world_size, ranks_per_host)
    ]
    for number, ranks in enumerate(hosts[:_SHOWN_HOSTS]):
        table.add_row(f"[bold]host {number}[/]", *(_place(layout, rank, used) for rank in ranks))
    if len(hosts) > _SHOWN_HOSTS:
        table.add_row(f"… {len(hosts) - _SHOWN_HOSTS} more")
    return table


def _place(layout: Layout, rank: int, used: Sequence[Axis]) -> str:
    place = layout.coordinates(rank)
    digits = ",".join(str(getattr(place, axis)) for axis in used)
    return f"{rank}[dim]({digits})[/]"


def _groups(layout: Layout, ranks_per_host: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("axis", "groups", "hosts each", "ranks", "what its members do"):
        table.add_column(column, no_wrap=column != "ranks")
    for axis in reversed(AXES):
        if getattr(layout, axis) == 1:
            continue
        groups = layout.groups([axis])
        hosts = max(len({rank // ranks_per_host for rank in group}) for group in groups[:1] + groups[-1:])
        shown = "  ".join(ranks_text(group) for group in groups[:_SHOWN_GROUPS])
        more = " …" if len(groups) > _SHOWN_GROUPS else ""
        table.add_row(axis, f"{len(groups)} of {len(groups[0])}", str(hosts), shown + more, _WHY[axis])
    return table
