"""What the network costs: steps by scenario and cause, how queues settle, what flows get."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.figures.style import PALETTE, Figure, Row, axis, column, figure

_ROW_PIXELS = 26
_LEAST_SHOWN_US = 0.1
"""An empty queue has no place on a logarithmic axis."""
_NAMES = {
    "oversubscription": "over-subscription",
    "hashing": "collisions of hashes",
    "placement": "where hosts stand",
    "congestion": "congestion control",
    "flap": "link down",
}


def lost_bars(rows: Sequence[Row], ideal_step_s: float) -> Figure:
    """What each scenario adds to a step, by cause.

    Args:
        rows: `scenario`, `why`, and seconds of each cause; None of `flap` where the job ends.
        ideal_step_s: a step's time on an ideal network.
    """
    traces = [_cause(rows, cause, place) for place, cause in enumerate(_NAMES)]
    ended = [row["scenario"] for row in rows if row["flap"] is None]
    title = f"What is added to a step of {ideal_step_s:.3f} s"
    if any(row["flap"] for row in rows) or ended:
        title += " in which a link goes down"
    return figure(
        [trace for trace in traces if any(trace["x"])],
        title,
        height=150 + _ROW_PIXELS * len(rows),
        barmode="relative",
        xaxis=axis("seconds added to a step"),
        yaxis=axis(categoryorder="array", categoryarray=column(rows, "scenario")[::-1]),
        annotations=[
            {
                "text": "the job ends",
                "x": 0,
                "y": name,
                "showarrow": False,
                "xanchor": "left",
                "xshift": 14,
                "font": {"color": PALETTE[3]},
            }
            for name in ended
        ],
    )


def _cause(rows: Sequence[Row], cause: str, place: int) -> dict[str, list[object]]:
    trace: dict[str, object] = {
        "type": "bar",
        "orientation": "h",
        "name": _NAMES[cause],
        "x": [row[cause] or 0.0 for row in rows],
        "y": column(rows, "scenario"),
        "text": [row["why"] for row in rows],
        "textposition": "none",
        "marker": {"color": PALETTE[place]},
        "hovertemplate": "%{fullData.name} %{x:.4f} s<br>%{text}<extra></extra>",
    }
    return trace  # type: ignore[return-value]


def queue_lines(rows: Sequence[Row], connections: int) -> Figure:
    """How the queue at the fullest link goes, by kind of congestion control.

    Args:
        rows: `control`, `time_s` and `queue_s`, of equal length, the latter as time to drain.
        connections: on the link.
    """
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": row["control"],
            "x": [1e3 * value for value in row["time_s"]],
            "y": [max(1e6 * value, _LEAST_SHOWN_US) for value in row["queue_s"]],
            "line": {"color": PALETTE[place % len(PALETTE)]},
            "hovertemplate": "%{y:.0f} µs at %{x:.1f} ms<extra>%{fullData.name}</extra>",
        }
        for place, row in enumerate(rows)
    ]
    return figure(
        traces,
        f"Queue at the fullest link after its {connections} connections start at once",
        xaxis=axis("ms since the start"),
        yaxis=axis("queue, µs to drain", type="log"),
    )
