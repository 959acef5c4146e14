"""Predictions against measurements."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.figures.style import PALETTE, Figure, Row, axis, figure


def errors_by_row(rows: Sequence[Row]) -> Figure:
    """The error of every row over its measured time; points above the line were predicted too slow.

    Args:
        rows: `table`, `row`, `measured_s`, `error`, a signed ratio.
    """
    tables = list(dict.fromkeys(row["table"] for row in rows))
    traces = [
        _points([row for row in rows if row["table"] == table], table, place) for place, table in enumerate(tables)
    ]
    return figure(
        traces,
        "Predicted against measured step times",
        height=460,
        xaxis=axis("measured seconds of a step", type="log"),
        yaxis=axis("error, per cent", zeroline=True),
    )


def _points(rows: Sequence[Row], table: str, place: int) -> dict[str, object]:
    crowd = len(rows) > 30
    return {
        "type": "scatter",
        "mode": "markers",
        "name": table,
        "x": [row["measured_s"] for row in rows],
        "y": [100 * row["error"] for row in rows],
        "text": [str(row["row"]) for row in rows],
        "marker": {
            "color": PALETTE[place % len(PALETTE)],
            "size": 5 if crowd else 10,
            "opacity": 0.5 if crowd else 1.0,
        },
        "hovertemplate": "%{text}: %{y:+.1f} %, measured %{x:.3g} s<extra>" + table + "</extra>",
    }
