"""Predictions against measurements."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.figures.style import PALETTE, Figure, Row, axis, column, figure

_ROW_PIXELS = 34


def errors_by_row(rows: Sequence[Row]) -> Figure:
    """The error of every row, table by table; points left of the line were predicted too fast.

    Args:
        rows: `table`, `row`, `measured_s`, `error`, a signed ratio.
    """
    tables = list(dict.fromkeys(column(rows, "table")))
    return figure(
        [_points([row for row in rows if row["table"] == table], table) for table in tables],
        "Errors of predicted step times, a point for each row (right of 0: predicted too slow)",
        height=100 + _ROW_PIXELS * len(tables),
        showlegend=False,
        xaxis=axis("error, per cent", zeroline=True),
        yaxis=axis(categoryorder="array", categoryarray=tables[::-1]),
    )


def _points(rows: Sequence[Row], table: str) -> dict[str, object]:
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
