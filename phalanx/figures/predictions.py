"""A predicted step: where its time goes, and what lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from phalanx.figures.style import PALETTE, Figure, Row, axis, color_of, column, figure

_ROW_PIXELS = 34
_MOST_BARS = 64


def step_breakdown(rows: Sequence[Row]) -> Figure:
    """Where a step goes: a bar for each group of parts, cut into its parts; hidden work is hatched.

    Args:
        rows: `path` (the group before the first slash), `seconds`, `mark`, and `hidden`, whether other work covers it.
    """
    groups = _groups(rows)
    names = list(groups)
    total_s = sum(row["seconds"] for row in rows if not row["hidden"])
    traces = [
        _segment(row, name, depth, color_of(name, position), total_s)
        for position, name in enumerate(names)
        for depth, row in enumerate(groups[name])
    ]
    return figure(
        traces,
        "Where a step goes (hatched: hidden behind other work)",
        height=90 + _ROW_PIXELS * len(names),
        barmode="stack",
        showlegend=False,
        bargap=0.25,
        xaxis=axis("seconds of a step", rangemode="tozero"),
        yaxis=axis(categoryorder="array", categoryarray=names[::-1]),
    )


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by group: those that cost most first, and in each the exposed parts before the hidden ones."""
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(row["path"].partition("/")[0], []).append(row)
    exposed = {name: sum(row["seconds"] for row in part if not row["hidden"]) for name, part in by_group.items()}
    order = sorted(by_group, key=lambda name: -exposed[name])
    return {name: sorted(by_group[name], key=lambda row: (row["hidden"], -row["seconds"])) for name in order}


def _segment(row: Row, group: str, depth: int, color: str, total_s: float) -> Row:
    """One part as a piece of the bar of its group; pieces beside each other differ in strength."""
    share = "hidden" if row["hidden"] else f"{100 * row['seconds'] / total_s:.1f} % of the step" if total_s else ""
    marker: dict[str, object] = {"color": color, "opacity": 0.35 if row["hidden"] else (1.0, 0.72)[depth % 2]}
    if row["hidden"]:
        marker["pattern"] = {"shape": "/", "size": 6}
    return {
        "type": "bar",
        "orientation": "h",
        "name": row["path"],
        "x": [row["seconds"]],
        "y": [group],
        "marker": marker,
        "hovertemplate": f"{row['path']}<br>%{{x:.4g}} s, {share}<br>{row['mark']}<extra></extra>",
    }


def memory_bars(rows: Sequence[Row], limit_bytes: float) -> Figure:
    """What lies in the memory of the fullest rank of each pipeline rank, against what a device has.

    Args:
        rows: `pipeline_rank`, `kind` and `bytes`, in the order of the kinds.
        limit_bytes: memory of the device.
    """
    kinds = list(dict.fromkeys(column(rows, "kind")))
    ranks = sorted(set(column(rows, "pipeline_rank")))
    shown = _spread(ranks)
    traces = []
    for number, kind in enumerate(kinds):
        of_kind = {row["pipeline_rank"]: row["bytes"] / 2**30 for row in rows if row["kind"] == kind}
        traces.append(
            {
                "type": "bar",
                "name": kind,
                "x": [str(rank) for rank in shown],
                "y": [of_kind.get(rank, 0.0) for rank in shown],
                "marker": {"color": PALETTE[number % len(PALETTE)]},
                "hovertemplate": f"pipeline rank %{{x}}<br>{kind} %{{y:.2f}} GiB<extra></extra>",
            }
        )
    some = "" if len(shown) == len(ranks) else f" ({len(shown)} of {len(ranks)} pipeline ranks)"
    return figure(
        traces,
        f"Memory of the fullest rank of each stage{some}",
        height=440,
        barmode="stack",
        bargap=0.3 if len(shown) > 2 else 0.7,
        xaxis=axis("pipeline rank", type="category"),
        yaxis=axis("GiB", rangemode="tozero"),
        **_limit(limit_bytes / 2**30),
    )


def _spread(ranks: Sequence[int]) -> list[int]:
    """At most so many that bars can be told apart, evenly spread, with the first and the last."""
    if len(ranks) <= _MOST_BARS:
        return list(ranks)
    picked = {round(i * (len(ranks) - 1) / (_MOST_BARS - 1)) for i in range(_MOST_BARS)}
    return [rank for rank, _ in groupby(ranks[place] for place in sorted(picked))]


def _limit(limit_gib: float) -> Row:
    """A dashed line at the device's memory, with its number."""
    place = {"xref": "paper", "yref": "y"}
    line = {"type": "line", "x0": 0, "x1": 1, "y0": limit_gib, "y1": limit_gib, "line": {"dash": "dash", "width": 1.5}}
    text = {"text": f"device: {limit_gib:.0f} GiB", "x": 1, "y": limit_gib, "showarrow": False, "yanchor": "bottom"}
    return {"shapes": [line | place], "annotations": [text | place | {"xanchor": "right"}]}
