"""What all figures share: their form, colours that colour-blind people tell apart, axes and texts.

A figure is a plain dictionary ``{"data": […], "layout": {…}}`` in Plotly's JSON schema, made by a pure function from a
table: a sequence of rows, each a mapping from column to value. Colours of background and text are left to the page
that shows it, light or dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, Any]
Figure: TypeAlias = dict[str, Any]

# Okabe and Ito's palette (without black and yellow, which vanish on one of the two backgrounds), one more in between.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C6BB1", "#7F7F7F")

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


def figure(data: Sequence[Mapping[str, Any]], title: str, *, height: int = 360, **layout: Any) -> Figure:
    """Traces with the layout that all figures have.

    Args:
        title: one sentence that says what is seen.
        height: pixels.
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
    }
    return {"data": [dict(trace) for trace in data], "layout": common | layout}


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """An axis with its title, which holds the unit; room for its labels is made by itself."""
    return {"title": {"text": title}, "automargin": True, "zeroline": False, **more}


def column(rows: Sequence[Row], name: str) -> list[Any]:
    """One column of a table."""
    return [row[name] for row in rows]
