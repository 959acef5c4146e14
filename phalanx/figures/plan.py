"""Figures of the planner: a predicted step and its memory, a search, a pipeline, predictions against measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from phalanx.figures.style import PALETTE, Figure, Row, axis, color_of, column, figure
from phalanx.parallel.pipeline.schedules import Kind
from phalanx.parallel.pipeline.timeline import Timeline

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


_SEARCH_ROW_PIXELS = 30
_LETTERS = 100
"""As many have room across a figure on a screen that is not narrow."""


def pareto_scatter(rows: Sequence[Row], limit_bytes: float) -> Figure:
    """Layouts by what they need and how long a step takes; the line joins those that nothing beats in both.

    Args:
        rows: `layout`, `step_s`, `bytes`, `mfu`, and `front`, whether nothing is both faster and leaner.
        limit_bytes: what a layout may fill.
    """
    front = sorted((row for row in rows if row["front"]), key=lambda row: row["bytes"])
    others = [row for row in rows if not row["front"]]
    traces = [
        _search_points(others, "other layouts", {"mode": "markers", "marker": {"color": PALETTE[4], "size": 8}}),
        _search_points(
            front,
            "neither faster nor leaner is possible",
            {
                "mode": "lines+markers",
                "marker": {"color": PALETTE[3], "size": 10},
                "line": {"color": PALETTE[3], "shape": "hv"},
            },
        ),
    ]
    limit_gib = limit_bytes / 2**30
    return figure(
        [trace for trace in traces if trace["x"]],
        "Memory for time",
        height=420,
        xaxis=axis("GiB on the fullest rank"),
        yaxis=axis("seconds of a step"),
        shapes=[
            {"type": "line", "x0": limit_gib, "x1": limit_gib, "xref": "x", "y0": 0, "y1": 1, "yref": "paper"}
            | {"line": {"dash": "dash", "width": 1.5}}
        ],
        annotations=[
            {"text": f"may be filled: {limit_gib:.0f} GiB", "x": limit_gib, "xref": "x", "y": 1, "yref": "paper"}
            | {"showarrow": False, "xanchor": "right", "yanchor": "top", "xshift": -4}
        ],
    )


def choice_costs(rows: Sequence[Row]) -> Figure:
    """How much longer a step takes with each value of each choice, all others being at their best.

    Args:
        rows: `choice`, `value`, `more`, the ratio by which the step is longer; the best's own value has 0.
    """
    choices = list(dict.fromkeys(column(rows, "choice")))
    most = 100 * max(column(rows, "more"), default=0.0) or 1.0
    trace = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [100 * row["more"] for row in rows],
        "y": column(rows, "choice"),
        "text": _labels(rows),
        "customdata": [str(value) for value in column(rows, "value")],
        "textposition": "top center",
        "marker": {"size": 10, "color": [PALETTE[2] if row["more"] <= 0 else PALETTE[3] for row in rows]},
        "hovertemplate": "%{y} = %{customdata}: %{x:.2f} % longer<extra></extra>",
        "cliponaxis": False,
    }
    return figure(
        [trace],
        "What hangs on each choice, the others being free",
        height=110 + _SEARCH_ROW_PIXELS * 2 * len(choices),
        # Labels reach beyond their points on both sides.
        xaxis=axis("per cent by which a step is longer", range=[-0.08 * most, 1.06 * most]),
        yaxis=axis(categoryorder="array", categoryarray=choices[::-1]),
    )


def _labels(rows: Sequence[Row]) -> list[str]:
    """The values as labels, but for those that would lie on another of the same choice; the best's is always there."""
    letter = max((row["more"] for row in rows), default=0.0) / _LETTERS
    shown: dict[str, list[tuple[float, int]]] = {}
    labels = [""] * len(rows)
    for place in sorted(range(len(rows)), key=lambda place: rows[place]["more"]):
        text, here = str(rows[place]["value"]), rows[place]["more"]
        taken = shown.setdefault(rows[place]["choice"], [])
        if all(abs(here - other) > letter * ((len(text) + length) / 2 + 1) for other, length in taken):
            taken.append((here, len(text)))
            labels[place] = text
    return labels


def _search_points(rows: Sequence[Row], name: str, look: Row) -> dict[str, object]:
    return {
        "type": "scatter",
        "name": name,
        "x": [row["bytes"] / 2**30 for row in rows],
        "y": column(rows, "step_s"),
        "text": [f"{row['layout']}, MFU {100 * row['mfu']:.1f} %" for row in rows],
        "hovertemplate": "%{text}<br>%{y:.3f} s, %{x:.1f} GiB<extra></extra>",
        **look,
    }


# Light for every other chunk of a rank, as the papers draw it.
_COLORS: dict[Kind, tuple[str, str]] = {
    "F": ("#0072B2", "#7FB8D8"),
    "B": ("#009E73", "#7FCEB9"),
    "I": ("#56B4E9", "#ABDAF4"),
    "W": ("#E69F00", "#F2CF80"),
}
_NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
_WAITS = "rgba(127,127,127,0.12)"
# Columns of the shortest action, and cells of a drawing at most: more only make its page larger.
_PER_ACTION = 4
_CELLS = 40_000


def pipeline_timeline(timeline: Timeline, title: str, unit: str, per_unit: float = 1.0) -> Figure:
    """One step of a schedule: ranks as rows, time as columns.

    Args:
        title: says what of the step is waiting.
        unit: of time, as the axis says it.
        per_unit: how much of the timeline's own unit that is.
    """
    table, columns = timeline.table, _columns(timeline)
    width = timeline.length / columns
    kinds = sorted({action.kind for row in table.actions for action in row}, key="FBIW".index)
    cells = [[0] * columns for _ in timeline.ranks]
    texts = [["waits"] * columns for _ in timeline.ranks]
    for row, text, timed in zip(cells, texts, timeline.ranks, strict=True):
        for action, begin, end in timed:
            odd = action.stage // table.ranks % 2
            span = slice(round(begin / width), round(end / width))
            count = span.stop - span.start
            row[span] = [1 + 2 * kinds.index(action.kind) + odd] * count
            text[span] = [f"{_NAMES[action.kind]} {action.micro_batch}, stage {action.stage}"] * count
    end, drawn_width = timeline.length / per_unit, width / per_unit
    heatmap = _heatmap(cells, texts, kinds) | {"x0": drawn_width / 2, "dx": drawn_width}
    return figure(
        [heatmap, *(_legend(kind) for kind in kinds)],
        title,
        height=110 + max(22 * len(cells), 100) if len(cells) <= 24 else 640,
        xaxis=axis(unit, showgrid=False, range=[0, end]),
        yaxis=axis("pipeline rank", autorange="reversed", showgrid=False, dtick=max(1, len(cells) // 8)),
    )


def _columns(timeline: Timeline) -> int:
    """So many that every action has some; where that would be too many cells, they share the step evenly."""
    shortest = min(end - begin for row in timeline.ranks for _, begin, end in row)
    wanted = math.ceil(timeline.length / shortest * _PER_ACTION)
    if shortest == 1 and float(timeline.length).is_integer():  # in theory, where times are whole
        wanted = int(timeline.length)
    return max(min(wanted, _CELLS // len(timeline.ranks)), 1)


def _heatmap(cells: list[list[int]], texts: list[list[str]], kinds: list[Kind]) -> dict[str, object]:
    colors = [_WAITS, *(color for kind in kinds for color in _COLORS[kind])]
    count = len(colors)
    # Plotly's scales are continuous: each colour holds from one bound to the next.
    scale = [[(number + step) / count, color] for number, color in enumerate(colors) for step in (0, 1)]
    return {
        "type": "heatmap",
        "z": cells,
        "text": texts,
        "zmin": -0.5,
        "zmax": count - 0.5,
        "colorscale": scale,
        "showscale": False,
        "ygap": 2,
        "hovertemplate": "rank %{y}, at %{x:.4g}<br>%{text}<extra></extra>",
    }


def _legend(kind: Kind) -> dict[str, object]:
    """An entry of the legend, which a heat map has none of."""
    marker = {"color": _COLORS[kind][0], "symbol": "square", "size": 10}
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": _NAMES[kind], "marker": marker}


_VALIDATION_ROW_PIXELS = 34


def errors_by_row(rows: Sequence[Row]) -> Figure:
    """The error of every row, table by table; points left of the line were predicted too fast.

    Args:
        rows: `table`, `row`, `measured_s`, `error`, a signed ratio.
    """
    tables = list(dict.fromkeys(column(rows, "table")))
    return figure(
        [_validation_points([row for row in rows if row["table"] == table], table) for table in tables],
        "Errors of predicted step times, a point for each row (right of 0: predicted too slow)",
        height=100 + _VALIDATION_ROW_PIXELS * len(tables),
        showlegend=False,
        xaxis=axis("error, per cent", zeroline=True),
        yaxis=axis(categoryorder="array", categoryarray=tables[::-1]),
    )


def _validation_points(rows: Sequence[Row], table: str) -> dict[str, object]:
    many = len(rows) > 30
    return {
        "type": "scatter",
        "mode": "markers",
        "name": table,
        "x": [100 * row["error"] for row in rows],
        "y": column(rows, "table"),
        "text": [f"{row['row']}, measured {row['measured_s']:.3g} s" for row in rows],
        "marker": {"color": PALETTE[0], "size": 7 if many else 10, "opacity": 0.25 if many else 0.7},
        "hovertemplate": "%{text}: %{x:+.1f} %<extra>" + table + "</extra>",
    }
