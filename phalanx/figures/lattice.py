"""Where a rank sits among all: its coordinates, its groups, what flows to whom, and what it did last.

A block for each pipeline stage, from left to right as activations flow; in it a row for each data-parallel index and a
column for each index within, tensor the fastest (MegaScale, section 5.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.core.layout import AXES, Axis, Coordinates, Layout
from phalanx.figures.style import Figure, Row, axis, figure

FLOWS: Mapping[Axis, str] = {
    "pipeline": "activations to the next stage, their gradients back",
    "replicate": "gradients are added up (all-reduce)",
    "shard": "parameters are gathered, gradients reduce-scattered",
    "context": "keys and values of the other parts of a sequence",
    "tensor": "activations are gathered and reduce-scattered in every layer",
}
_LOOKS: Mapping[Axis, tuple[str, str]] = {
    "tensor": ("square", "#E69F00"),
    "context": ("hexagon", "#8C6BB1"),
    "shard": ("diamond", "#D55E00"),
    "replicate": ("triangle-up", "#CC79A7"),
    "pipeline": ("circle", "#009E73"),
}
_MOST_WHOLE = 512
_OFF = 0.32
_ROWS_AROUND, _STAGES_AROUND = 16, 4


@dataclass(frozen=True)
class Flow:
    """What a rank exchanges along one axis.

    Attributes:
        ranks: of its group, itself among them.
        receives_from, sends_to: its neighbours in that group; None: there is none, such as before the first stage.
    """

    axis: Axis
    ranks: tuple[int, ...]
    what: str
    receives_from: int | None
    sends_to: int | None


def rank_flows(layout: Layout, rank: int, *, chunks: int = 1) -> list[Flow]:
    """The groups of `rank` over each axis in use, with what flows in them.

    Args:
        chunks: of each pipeline rank; with several in a loop, the last stage's rank sends on to the first's.

    Raises:
        ValueError: there is no such rank.
    """
    flows = []
    for name in AXES:
        members = layout.members(rank, [name])
        if len(members) < 2:
            continue
        place = members.index(rank)
        is_ring = name != "pipeline" or chunks > 1
        before = members[place - 1] if place or is_ring else None
        after = members[(place + 1) % len(members)] if place + 1 < len(members) or is_ring else None
        flows.append(Flow(name, members, FLOWS[name], before, after))
    return flows


def rank_lattice(layout: Layout, rank: int, *, last_events: Mapping[int, str] | None = None, chunks: int = 1) -> Figure:
    """All ranks, with the chosen one, its groups and the stages that it sends to.

    With more than 512 ranks only the planes through the chosen one are there: its own stage, and of other stages the
    row and the column that it is in; of these the nearest 16 rows to each side and 4 stages, and the first and last.

    Args:
        last_events: of ranks, such as ``all_gather of shard, 12 s ago``. Where some have one, those without are crossed
            out: a rank that waits still tells so, one that is stuck does not.
        chunks: as in `rank_flows`.

    Raises:
        ValueError: there is no such rank.
    """
    flows = rank_flows(layout, rank, chunks=chunks)
    here = layout.coordinates(rank)
    shown = _shown(layout, here)
    positions = _positions(layout, shown)
    roles: dict[int, Axis] = {other: flow.axis for flow in flows for other in flow.ranks if other != rank}
    others = [one for one in shown if one != rank and one not in roles]
    events = last_events or {}
    small = 9 if len(shown) <= _MOST_WHOLE else 6
    points = [_points("other ranks", others, positions, layout, events, ("circle-open", "#7F7F7F"), small)]
    for flow in flows:
        of_group = [one for one in flow.ranks if one != rank and one in positions]
        name = f"{flow.axis} group of {len(flow.ranks)}: {flow.what}"
        points.append(_points(name, of_group, positions, layout, events, _LOOKS[flow.axis], small + 3))
    points.append(_points(f"rank {rank}", [rank], positions, layout, events, ("star", "#0072B2"), 18))
    silent = [one for one in shown if one not in events] if events else []
    points.append(_points("no last event", silent, positions, layout, events, ("x-thin-open", "#D55E00"), small + 6))
    place = ", ".join(
        f"{name} {at} of {size}" for name, at, size in zip(AXES, here, layout.sizes, strict=True) if size > 1
    )
    left_out = f" ({len(shown):,} of {layout.world_size:,} ranks are shown)" if len(shown) < layout.world_size else ""
    last = f"; last: {events[rank]}" if rank in events else "; no last event" if events else ""
    rows = len({y for _, y in positions.values()})
    return figure(
        [one for one in points if one["x"]],
        f"Rank {rank} of {layout}: {place or 'alone'}{last}{left_out}",
        height=min(max(260 + 24 * rows, 320), 900),
        description=_told(rank, layout, place, flows, last),
        hovermode="closest",
        annotations=[*_arrows(flows, rank, positions), *_stage_names(layout, shown, positions)],
        xaxis=axis("pipeline stage, in each context · tensor", showticklabels=False, showgrid=False),
        yaxis=axis(
            "replicate · shard", autorange="reversed", domain=[0, 0.93], showgrid=False, **_row_ticks(layout, shown)
        ),
    )


def _data_index(layout: Layout, at: Coordinates) -> int:
    return at.replicate * layout.shard + at.shard


def _inner_index(layout: Layout, at: Coordinates) -> int:
    return at.context * layout.tensor + at.tensor


def _shown(layout: Layout, here: Coordinates) -> list[int]:
    """Ranks that are drawn; see `rank_lattice`."""
    if layout.world_size <= _MOST_WHOLE:
        return list(range(layout.world_size))
    row, column = _data_index(layout, here), _inner_index(layout, here)
    rows, columns = layout.replicate * layout.shard, layout.context * layout.tensor
    near = range(max(row - _ROWS_AROUND, 0), min(row + _ROWS_AROUND + 1, rows))
    stages = {0, layout.pipeline - 1, *range(here.pipeline - _STAGES_AROUND, here.pipeline + _STAGES_AROUND + 1)}
    shown = []
    for stage in sorted(stages & set(range(layout.pipeline))):
        for y in near:
            for x in range(columns):
                if stage == here.pipeline or y == row or x == column:
                    shown.append((stage * rows + y) * columns + x)
    return shown


def _positions(layout: Layout, shown: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Where each is drawn: stages beside each other with a gap of two columns (one more where some are left out)."""
    columns = layout.context * layout.tensor
    stages = sorted({layout.coordinates(one).pipeline for one in shown})
    left, starts = 0, {}
    for number, stage in enumerate(stages):
        left += 2 * (number > 0 and stage > stages[number - 1] + 1)
        starts[stage] = left
        left += columns + 2
    at = {one: layout.coordinates(one) for one in shown}
    return {one: (starts[c.pipeline] + _inner_index(layout, c), _data_index(layout, c)) for one, c in at.items()}


def _points(
    name: str,
    ranks: Sequence[int],
    positions: Mapping[int, tuple[int, int]],
    layout: Layout,
    events: Mapping[int, str],
    look: tuple[str, str],
    size: int,
) -> Row:
    symbol, color = look
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [positions[rank][0] for rank in ranks],
        "y": [positions[rank][1] for rank in ranks],
        "customdata": list(ranks),
        "text": [_hover(layout, rank, events) for rank in ranks],
        "marker": {"symbol": symbol, "color": color, "size": size, "line": {"width": 2 * symbol.endswith("thin-open")}},
        "hovertemplate": "%{text}<extra></extra>",
    }


def _hover(layout: Layout, rank: int, events: Mapping[int, str]) -> str:
    at = layout.coordinates(rank)
    place = ", ".join(f"{name} {index}" for name, index, size in zip(AXES, at, layout.sizes, strict=True) if size > 1)
    return f"rank {rank}" + f"<br>{place}" * bool(place) + (f"<br>last: {events[rank]}" if rank in events else "")


def _arrows(flows: Sequence[Flow], rank: int, positions: Mapping[int, tuple[int, int]]) -> list[Row]:
    """From the chosen rank to who takes its activations or keys and values, and to it from who gives them."""
    arrows = []
    for flow in flows:
        if flow.axis not in ("pipeline", "context"):
            continue
        for source, target in ((flow.receives_from, rank), (rank, flow.sends_to)):
            if source is None or target is None or source == target:
                continue
            if source in positions and target in positions:
                arrows.append(_arrow(positions[source], positions[target], _LOOKS[flow.axis][1], off=-_OFF, width=2))
                if flow.axis == "pipeline":  # and gradients come back
                    arrows.append(_arrow(positions[target], positions[source], _LOOKS[flow.axis][1], off=_OFF, width=1))
    return arrows


def _arrow(source: tuple[int, int], target: tuple[int, int], color: str, *, off: float, width: int) -> Row:
    """Beside the line through both, where other ranks lie."""
    ends = {"ax": source[0], "ay": source[1] + off, "x": target[0], "y": target[1] + off, "axref": "x", "ayref": "y"}
    return ends | {"showarrow": True, "text": "", "arrowhead": 2, "arrowwidth": width, "arrowcolor": color}


def _stage_names(layout: Layout, shown: Sequence[int], positions: Mapping[int, tuple[int, int]]) -> list[Row]:
    if layout.pipeline == 1:
        return []
    columns: dict[int, list[int]] = {}
    for one in shown:
        columns.setdefault(layout.coordinates(one).pipeline, []).append(positions[one][0])
    place = {"y": 1, "yref": "paper", "yanchor": "top", "showarrow": False}
    return [
        place | {"text": f"stage {stage}" if len(columns) <= 8 else str(stage), "x": (min(xs) + max(xs)) / 2}
        for stage, xs in columns.items()
    ]


def _row_ticks(layout: Layout, shown: Sequence[int]) -> dict[str, object]:
    rows = sorted({_data_index(layout, layout.coordinates(one)) for one in shown})
    return {"tickvals": rows[:: -(-len(rows) // 16)]}


def _told(rank: int, layout: Layout, place: str, flows: Sequence[Flow], last: str) -> str:
    parts = [f"{flow.axis} group of {len(flow.ranks)} ranks from {flow.ranks[0]} to {flow.ranks[-1]}" for flow in flows]
    return f"Rank {rank} of {layout.world_size:,} ({layout}): {place or 'alone'}; " + "; ".join(parts) + last
