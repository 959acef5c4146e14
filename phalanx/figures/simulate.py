"""Figures of the simulator: months of a job, and what the network costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.figures.style import LOSS_COLORS, PALETTE, Figure, Row, axis, column, figure


def time_shares(rows: Sequence[Row]) -> Figure:
    """Where the time goes, apart from training, as bars with what 95 % of the runs have.

    Args:
        rows: `part`, `share` (mean), `least` and `most`, ratios.
    """
    shown = [row for row in rows if row["part"] != "training" and row["most"] > 1e-9]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [100 * row["share"] for row in shown],
        "y": column(shown, "part"),
        "marker": {"color": [LOSS_COLORS.get(row["part"], PALETTE[7]) for row in shown]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [100 * (row["most"] - row["share"]) for row in shown],
            "arrayminus": [100 * (row["share"] - row["least"]) for row in shown],
            "thickness": 1,
        },
        "hovertemplate": "%{y}: %{x:.2f} %<extra></extra>",
    }
    return figure(
        [trace],
        "Where the time goes that does not train (lines: 95 % of the runs)",
        height=120 + 34 * max(len(shown), 1),
        xaxis=axis("per cent of the time", rangemode="tozero"),
        yaxis=axis(categoryorder="array", categoryarray=column(shown, "part")[::-1]),
    )


def run_histogram(values: Sequence[float], title: str, unit: str, mark: float | None = None) -> Figure:
    """How many runs have how much of something.

    Args:
        unit: of the values, for the axis.
        mark: a value to compare with, such as a formula's.
    """
    trace = {
        "type": "histogram",
        "x": list(values),
        "nbinsx": 40,
        "marker": {"color": PALETTE[4]},
        "hovertemplate": "%{x}: %{y} runs<extra></extra>",
    }
    lines: dict[str, Any] = {}
    if mark is not None:
        lines = {
            "shapes": [
                {"type": "line", "x0": mark, "x1": mark, "y0": 0, "y1": 1, "yref": "paper"}
                | {"line": {"dash": "dash", "width": 1.5}}
            ],
            "annotations": [
                {"text": "by formula", "x": mark, "y": 1, "yref": "paper", "showarrow": False}
                | {"xanchor": "left", "yanchor": "top", "xshift": 4}
            ],
        }
    return figure([trace], title, xaxis=axis(unit), yaxis=axis("number of runs"), bargap=0.02, **lines)


def choice_lines(rows: Sequence[Row], played: Sequence[Row], title: str, unit: str, *, is_log: bool = False) -> Figure:
    """Effective time and goodput over a choice by formula; beside them what was played.

    Args:
        rows: `value`, `ettr`, `goodput`, in the order of the values.
        played: `value`, `ettr`, `low`, `high`: means and their 95 % confidence; may be empty.
        unit: of the values, for the axis.
    """
    traces = [
        _line(rows, "ettr", "effective training time", PALETTE[0]),
        _line(rows, "goodput", "goodput, of all that is paid", PALETTE[2]),
    ]
    if played:
        bars = {
            "type": "data",
            "symmetric": False,
            "array": [100 * (row["high"] - row["ettr"]) for row in played],
            "arrayminus": [100 * (row["ettr"] - row["low"]) for row in played],
        }
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "effective, played",
                "x": column(played, "value"),
                "y": [100 * row["ettr"] for row in played],
                "error_y": bars,
                "marker": {"color": PALETTE[3], "size": 8},
            }
        )
    across = axis(unit, type="log") if is_log else axis(unit)
    return figure(traces, title, xaxis=across, yaxis=axis("per cent of the time"))


def _line(rows: Sequence[Row], key: str, name: str, colour: str) -> Row:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": column(rows, "value"),
        "y": [100 * row[key] for row in rows],
        "line": {"color": colour},
        "hovertemplate": f"{name}: %{{y:.2f}} % at %{{x:.4g}}<extra></extra>",
    }


def straggler_lines(rows: Sequence[Row]) -> Figure:
    """How much longer a step is because hosts wait for the slowest, by their number.

    Args:
        rows: `hosts`, and the ratios `alike_ratio`, `unfound_ratio`, `found_ratio`, `restarts_ratio`.
    """
    names = {
        "alike_ratio": "without slow hosts",
        "unfound_ratio": "with slow hosts that nobody finds",
        "found_ratio": "with slow hosts that are found",
        "restarts_ratio": "restarts for that",
    }
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": column(rows, "hosts"),
            "y": [100 * row[key] for row in rows],
            "line": {"color": PALETTE[number]},
        }
        for number, (key, name) in enumerate(names.items())
    ]
    return figure(
        traces,
        "How much longer a step is, waiting for the slowest host",
        xaxis=axis("hosts", type="log"),
        yaxis=axis("per cent of a step", rangemode="tozero"),
    )


_ROW_PIXELS = 26
_LEAST_SHOWN_US = 0.1  # an empty queue has no place on a logarithmic axis
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
    """How the queue at the fullest link goes, by kind of congestion control."""
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
