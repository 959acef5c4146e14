"""What a search found: layouts by memory and time, and what hangs on each choice."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.figures.style import PALETTE, Figure, Row, axis, column, figure

_ROW_PIXELS = 30
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
        _points(others, "other layouts", {"mode": "markers", "marker": {"color": PALETTE[4], "size": 8}}),
        _points(
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
        height=110 + _ROW_PIXELS * 2 * len(choices),
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


def _points(rows: Sequence[Row], name: str, look: Row) -> dict[str, object]:
    return {
        "type": "scatter",
        "name": name,
        "x": [row["bytes"] / 2**30 for row in rows],
        "y": column(rows, "step_s"),
        "text": [f"{row['layout']}, MFU {100 * row['mfu']:.1f} %" for row in rows],
        "hovertemplate": "%{text}<br>%{y:.3f} s, %{x:.1f} GiB<extra></extra>",
        **look,
    }
