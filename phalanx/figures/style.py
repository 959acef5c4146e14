"""What all figures share: their form, colours that colour-blind people tell apart, axes and texts.

A figure is a plain dictionary ``{"data": […], "layout": {…}}`` in Plotly's JSON schema, made by a pure function from a
table: a sequence of rows, each a mapping from column to value, or a table of pyarrow where there are many. Colours of
background and text are left to the page that shows it, light or dark.

What a figure says in one sentence goes with it, for who does not see it (``layout.meta.description``; `described`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

Row: TypeAlias = Mapping[str, Any]
Figure: TypeAlias = dict[str, Any]
T = TypeVar("T")

# Okabe and Ito's palette (without black and yellow, which vanish on one of the two backgrounds), one more in between.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C6BB1", "#7F7F7F")

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "hexagon")
"""Beside the colours, so that neither is needed alone; seven of them and eight colours make 56 different pairs."""

_FEW_TICKS = 12

SEQUENTIAL = "Cividis"
"""Colour-blind people see it as others do; each cell has a colour of its own, on light and dark pages."""

DIVERGING = [[0.0, "#0072B2"], [0.5, "rgba(140,140,140,0.16)"], [1.0, "#D55E00"]]
"""Around a middle: blue is less, orange is more; what is in the middle recedes on light and dark pages."""

SPAN_COLORS = {
    "step": "#7F7F7F",
    "data": "#CC79A7",
    "forward": "#0072B2",
    "backward": "#009E73",
    "collective": "#E69F00",
    "wait": "#D55E00",
    "optimizer": "#56B4E9",
    "snapshot": "#8C6BB1",
    "persist": "#B8860B",
    "evaluation": "#A0522D",
    "startup": "#5C7C8A",
    "user": "#7F7F7F",
    "other": "#7F7F7F",
}
"""By kind of span, the same in all figures."""

LOSS_COLORS = {
    "training": "#009E73",
    "saving": "#56B4E9",
    "made again": "#D55E00",
    "slow hosts": "#CC79A7",
    "fewer hosts": "#8C6BB1",
    "planned": "#7F7F7F",
    "detection": "#E69F00",
    "queue": "#B8860B",
    "stalled": "#E31A1C",
    "restart": "#0072B2",
    "waiting for hosts": "#A0522D",
}
"""By what the time of a job goes on, played or lived through."""

HATCHED: Mapping[str, Any] = {
    "fillmode": "overlay",
    "fgcolor": "#000000",
    "fgopacity": 0.45,
    "size": 6,
    "solidity": 0.2,
}
"""A pattern over the colour of a bar, but for its shape."""

_GRID = "rgba(127,127,127,0.25)"

_KNOWN = {
    "compute": "#0072B2",
    "tensor": "#E69F00",
    "context": "#8C6BB1",
    "expert": "#CC79A7",
    "pipeline": "#009E73",
    "data": "#D55E00",
    "optimizer": "#56B4E9",
    "stragglers": "#7F7F7F",
}


def color_of(group: str, position: int = 0) -> str:
    """The colour of a group of parts, the same in all figures.

    Args:
        position: of the group among others, which decides for those that have no colour of their own.
    """
    return _KNOWN.get(group, PALETTE[position % len(PALETTE)])


def figure(
    data: Sequence[Mapping[str, Any]], title: str, *, height: int = 360, description: str = "", **layout: Any
) -> Figure:
    """Traces with the layout that all figures have.

    Args:
        title: one sentence that says what is seen.
        height: pixels.
        description: what is seen, for who does not see it; empty: the title says it.
        layout: of Plotly, over what is common.
    """
    common: dict[str, Any] = {
        "title": {"text": title, "x": 0, "xref": "container", "font": {"size": 15}},
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 48, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "legend": {"orientation": "h", "x": 0, "y": -0.02, "yref": "container", "yanchor": "bottom"},
        "hoverlabel": {"align": "left"},
        "meta": {"description": description or title},
    }
    return {"data": [dict(trace) for trace in data], "layout": common | layout}


def described(figure: Figure) -> str:
    """What the figure says, in one sentence: the text for who does not see it."""
    return str(figure["layout"]["meta"]["description"])


def empty(title: str, why: str) -> Figure:
    """A figure that says why there is nothing to see."""
    note = {"text": why, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False}
    hidden = {"visible": False}
    return figure([], title, height=160, description=f"{title}: {why}", annotations=[note], xaxis=hidden, yaxis=hidden)


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """An axis with its title, which holds the unit; room for its labels is made by itself."""
    return {"title": {"text": title}, "automargin": True, "zeroline": False, "gridcolor": _GRID, **more}


def whole_ticks(numbers: Sequence[int]) -> dict[str, Any]:
    """For an axis of things that are counted, such as ranks: of few of them it marks each, and nothing between two."""
    return {"dtick": 1} if len(numbers) and max(numbers) - min(numbers) < _FEW_TICKS else {}


def thinned(values: Sequence[T], most: int) -> list[T]:
    """At most `most` of them, evenly spread, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[place] for place in sorted({round(step * (len(values) - 1) / (most - 1)) for step in range(most)})]


def column(rows: Sequence[Row], name: str) -> list[Any]:
    """One column of a table."""
    return [row[name] for row in rows]
