"""Who sends how much to whom: bytes between ranks, or between blocks of ranks where there are many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from phalanx.figures.series import packed
from phalanx.figures.style import SEQUENTIAL, Figure, axis, empty, figure, whole_ticks
from phalanx.telemetry.message_pairs import side_of

_MOST_ROWS = 512
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def communication_matrix(
    spans: pa.Table, groups: Sequence[Mapping[str, Any]], *, most_rows: int = _MOST_ROWS
) -> Figure:
    """Bytes from each rank (rows) to each other (columns), with colours by the logarithm.

    A message counts once, from its sender. A collective has no single peer: what its span holds is taken to go to the
    next member of the group, as in a ring; an all-to-all goes to all others in equal parts. So sums of rows are what
    ranks handed over; what a library really sends (trees, hosts first) may go other ways.

    Args:
        spans: kind ``collective`` (`phalanx.telemetry.span_store.SPANS`), or sums of them with `rank`, `peer`, `name`,
            `group`, `bytes`.
        groups: ``{"group": "shard", "ranks": [0, 1]}`` (`phalanx.telemetry.alike_ranks.groups_of`).
        most_rows: of the figure; with more ranks, neighbours are one block.
    """
    sources, targets, amounts, unplaced = pair_bytes(spans, groups)
    if not len(amounts):
        return empty("Bytes between ranks", "no collective of these steps says how many bytes it moved")
    world = int(max(sources.max(), targets.max(), max((max(g["ranks"]) for g in groups), default=0))) + 1
    block = 1 << (-(-world // most_rows) - 1).bit_length()  # so that it holds whole hosts, or lies within one
    rows = -(-world // block)
    matrix = np.bincount(sources // block * rows + targets // block, amounts, rows * rows).reshape(rows, rows)
    size, unit = _unit(float(matrix.max()))
    all_size, all_unit = _unit(float(amounts.sum()))
    with np.errstate(divide="ignore"):
        logarithms = np.where(matrix > 0, np.log10(matrix), np.nan)
    high = float(np.nanmax(logarithms))
    low = min(float(np.nanmin(logarithms)), high - 1)
    ticks = np.linspace(low, high, 4)
    source, target = np.unravel_index(int(matrix.argmax()), matrix.shape)
    ends = f"from {_named(int(source), block, world)} to {_named(int(target), block, world)}"
    told = f"most, {matrix.max() / size:.3g} {unit}, {ends}"
    rest = f"; {100 * unplaced / (unplaced + amounts.sum()):.0f} % of bytes have no known group" if unplaced else ""
    of_what = "ranks" if block == 1 else f"blocks of {block} ranks"
    places = np.arange(rows) * block
    heatmap = {
        "type": "heatmap",
        "x": packed(places),
        "y": packed(places),
        "z": packed(logarithms.astype(np.float32)),
        "customdata": packed((matrix / size).astype(np.float32)),
        "zmin": low,
        "zmax": high,
        "colorscale": SEQUENTIAL,
        "colorbar": {
            "title": {"text": unit},
            "thickness": 12,
            "outlinewidth": 0,
            "tickvals": ticks.tolist(),
            "ticktext": [f"{10**tick / size:.2g}" for tick in ticks],
        },
        "hovertemplate": f"from %{{y}} to %{{x}}: %{{customdata:.4g}} {unit}<extra></extra>",
    }
    first = "" if block == 1 else ", first of each block"
    square = {"showgrid": False, "constrain": "domain", **whole_ticks(places.tolist())}
    return figure(
        [heatmap],
        f"Bytes between {of_what}, collectives as rings: {told}{rest}",
        height=620,
        description=f"Bytes between {world:,} ranks, in all {amounts.sum() / all_size:.4g} {all_unit}: {told}{rest}",
        xaxis=axis(f"to rank{first}", **square),
        yaxis=axis(f"from rank{first}", autorange="reversed", scaleanchor="x", **square),
    )


def pair_bytes(
    spans: pa.Table, groups: Sequence[Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Bytes by pair of ranks: sources, targets, amounts, and the bytes of collectives whose group is not known.

    Where the spans of only one side of a message are there, that side counts.
    """
    if "kind" in spans.column_names:
        spans = spans.filter(pc.equal(spans["kind"].cast(pa.string()), "collective"))
    sums = spans.group_by(["rank", "peer", "name", "group"]).aggregate([("bytes", "sum")]).to_pylist()
    seen = {(one["group"], one["rank"]) for one in sums}
    members = {
        (one["group"], rank): (one["ranks"], place)
        for one in groups
        for place, rank in enumerate(one["ranks"])
        if (one["group"], rank) in seen
    }
    sent: dict[tuple[int, int], float] = {}
    received: dict[tuple[int, int], float] = {}
    pairs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    unplaced = 0.0
    for one in sums:
        rank, peer, amount, name = one["rank"], one["peer"], float(one["bytes_sum"] or 0), one["name"] or ""
        if not amount:
            continue
        if peer >= 0:
            pair, side = ((peer, rank), received) if side_of(name) == "receive" else ((rank, peer), sent)
            side[pair] = side.get(pair, 0.0) + amount
        elif (one["group"], rank) not in members:
            unplaced += amount
        else:
            ranks, place = members[one["group"], rank]
            group = np.array(ranks)
            targets = group[group != rank] if "to_all" in name else group[[(place + 1) % len(group)]]
            if len(group) > 1:
                pairs.append((np.full_like(targets, rank), targets, np.full(len(targets), amount / len(targets))))
    messages = received | sent
    keys = np.array(list(messages), np.int64).reshape(-1, 2)
    pairs.append((keys[:, 0], keys[:, 1], np.array(list(messages.values()), float)))
    sources, targets, amounts = (np.concatenate(side) for side in zip(*pairs, strict=True))
    world = int(max(sources.max(initial=0), targets.max(initial=0))) + 1
    numbers, of_pair = np.unique(sources * world + targets, return_inverse=True)
    return numbers // world, numbers % world, np.bincount(of_pair, amounts, len(numbers)), unplaced


def _unit(amount: float) -> tuple[int, str]:
    return next((size, unit) for size, unit in _UNITS if amount >= size or size == 1)


def _named(row: int, block: int, world: int) -> str:
    first = row * block
    return f"rank {first}" if block == 1 else f"ranks {first}–{min(first + block, world) - 1}"
