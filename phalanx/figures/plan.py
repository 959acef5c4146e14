"""Figures of the planner: a predicted step and its memory, a search, predictions against measurements."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.figures.style import PALETTE, Figure, Row, axis, color_of, column, figure, thinned

_ROW_PIXELS, _SEARCH_ROW_PIXELS = 34, 30
_MOST_BARS = 64


def step_breakdown(rows: Sequence[Row]) -> Figure:
    """Where a step goes: a bar for each group of parts, cut into its parts; hidden work is hatched.

    Args:
        rows: `path` (the group before the first slash), `seconds`, `mark`, and `hidden`, whether other work covers it.
    """
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(row["path"].partition("/")[0], []).append(row)
    exposed = {name: sum(row["seconds"] for row in part if not row["hidden"]) for name, part in by_group.items()}
    names = sorted(by_group, key=lambda name: -exposed[name])  # what costs most first; in each exposed parts first
    groups = {name: sorted(by_group[name], key=lambda row: (row["hidden"], -row["seconds"])) for name in names}
    total_s = sum(exposed.values())
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
    """
    kinds = list(dict.fromkeys(column(rows, "kind")))
    ranks = sorted(set(column(rows, "pipeline_rank")))
    shown = thinned(ranks, _MOST_BARS)  # more bars could not be told apart
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
    limit = limit_bytes / 2**30
    place = {"xref": "paper", "yref": "y"}
    line = {"type": "line", "x0": 0, "x1": 1, "y0": limit, "y1": limit, "line": {"dash": "dash", "width": 1.5}}
    text = {"text": f"device: {limit:.0f} GiB", "x": 1, "y": limit, "showarrow": False, "yanchor": "bottom"}
    return figure(
        traces,
        f"Memory of the fullest rank of each stage{some}",
        height=440,
        barmode="stack",
        bargap=0.3 if len(shown) > 2 else 0.7,
        xaxis=axis("pipeline rank", type="category"),
        yaxis=axis("GiB", rangemode="tozero"),
        shapes=[line | place],
        annotations=[text | place | {"xanchor": "right"}],
    )


_LETTERS = 100  # as many have room across a figure on a screen that is not narrow


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
    # Labels that would lie on another of the same choice are left out; the best's is always there.
    letter = max((row["more"] for row in rows), default=0.0) / _LETTERS
    shown: dict[str, list[tuple[float, int]]] = {}
    labels = [""] * len(rows)
    for place in sorted(range(len(rows)), key=lambda place: rows[place]["more"]):
        text, here = str(rows[place]["value"]), rows[place]["more"]
        taken = shown.setdefault(rows[place]["choice"], [])
        if all(abs(here - other) > letter * ((len(text) + length) / 2 + 1) for other, length in taken):
            taken.append((here, len(text)))
            labels[place] = text
    trace = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [100 * row["more"] for row in rows],
        "y": column(rows, "choice"),
        "text": labels,
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
        height=100 + _ROW_PIXELS * len(tables),
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
