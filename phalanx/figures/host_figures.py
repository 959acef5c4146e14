"""A host over time: its counters one below the other, and how long its ranks compute beside those that do the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from phalanx.figures.series import fewer, packed
from phalanx.figures.style import PALETTE, SYMBOLS, Figure, Row, axis, empty, figure

_MOST_POINTS = 1200
_ROW_PIXELS, _LABEL_PIXELS = 108, 26
_COLUMNS = (0.0, 0.47), (0.53, 1.0)
_DASHES = ("solid", "dash", "dot", "dashdot")

_ROWS: Sequence[tuple[str, Mapping[str, str], float, bool]] = (
    ("GPU busy, %", {"gpu_utilisation_ratio": "busy", "gpu_memory_activity_ratio": "memory busy"}, 100.0, False),
    ("GPU, °C", {"gpu_temperature_celsius": "temperature"}, 1.0, False),
    ("GPU, W", {"gpu_power_watts": "power"}, 1.0, False),
    ("GPU clock, GHz", {"gpu_sm_clock_hertz": "clock"}, 1e-9, False),
    ("GPU memory, GiB", {"gpu_memory_used_bytes": "memory"}, 2**-30, False),
    ("CPU busy, %", {"cpu_utilisation_ratio": "CPU"}, 100.0, False),
    ("memory, GiB", {"memory_used_bytes": "used"}, 2**-30, False),
    ("network, GB/s", {"network_receive_bytes_total": "in", "network_transmit_bytes_total": "out"}, 1e-9, True),
    ("network errors/s", {"network_errors_total": "errors", "network_drops_total": "drops"}, 1.0, True),
    ("host, °C", {"temperature_celsius": "temperature"}, 1.0, False),
)
"""Of each row: its unit, counters and what they are called in it, a factor, and whether a counter's growth is meant."""


def host_counters(counters: pa.Table, host: str) -> Figure:
    """Counters of a host as rows of curves on one axis of time; a row that the host does not have is left out.

    Args:
        counters: `end_ns` (Unix), `gpu` (-1: of the host), `name` and `value` (`phalanx.telemetry.counters.COUNTERS`).
    """
    title = f"Counters of {host}"
    if not counters.num_rows:
        return empty(title, "no counters of this host were kept")
    series = _series(counters)
    rows = [
        (unit, drawn) for unit, names, factor, is_growth in _ROWS if (drawn := _drawn(series, names, factor, is_growth))
    ]
    if not rows:
        return empty(title, "none of its counters is known here")
    origin_ns = min(int(times[0]) for _, drawn in rows for _, _, times, _ in drawn)
    traces, layout, told, names = [], {}, [], []
    lines = -(-len(rows) // 2)
    whole = lines * _ROW_PIXELS
    for number, (unit, drawn) in enumerate(rows):
        suffix = "" if number == 0 else str(number + 1)
        line, column = divmod(number, 2)
        top, bottom = 1 - (line * _ROW_PIXELS + _LABEL_PIXELS) / whole, 1 - (line + 1) * _ROW_PIXELS / whole
        layout[f"yaxis{suffix}"] = axis(domain=[max(bottom + 4 / whole, 0.0), top], nticks=4, anchor=f"x{suffix}")
        is_lowest = number >= len(rows) - 2
        layout[f"xaxis{suffix}"] = axis(
            "seconds" if is_lowest else "", domain=list(_COLUMNS[column]), anchor=f"y{suffix}", showticklabels=is_lowest
        ) | ({} if number == 0 else {"matches": "x"})
        names.append(_label(unit, _COLUMNS[column][0], top))
        for name, gpu, times_ns, values in drawn:
            axes = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
            traces.append(_curve(name, gpu, (times_ns - origin_ns) / 1e9, values, axes))
        told.append(f"{unit} {_span_of([values for *_, values in drawn])}")
    gpus = len({gpu for _, drawn in rows for _, gpu, _, _ in drawn if gpu >= 0})
    return figure(
        traces,
        f"{title}" + (f", {gpus} GPU{'s' * (gpus > 1)}: {_gpu_colors(gpus)}" if gpus else ""),
        height=100 + whole,
        description=f"{title}: " + "; ".join(told),
        showlegend=False,
        hovermode="closest",
        annotations=names,
        **layout,
    )


def _label(unit: str, x: float, y: float) -> Row:
    place = {"x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
    return {"text": f"<b>{unit}</b>", "showarrow": False, "font": {"size": 12}} | place


def _gpu_colors(gpus: int) -> str:
    names = ("blue", "orange", "green", "red", "light blue", "pink", "violet", "grey")
    return ", ".join(f"{gpu} {name}" for gpu, name in enumerate(names[:gpus]))


def _series(counters: pa.Table) -> dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]:
    """Times and values of each counter and GPU, in order."""
    names, of_row = np.unique(
        counters["name"].cast(pa.string()).to_numpy(zero_copy_only=False).astype(str), return_inverse=True
    )
    gpus, times_ns = counters["gpu"].to_numpy(), counters["end_ns"].to_numpy()
    values = counters["value"].to_numpy()
    found = {}
    for gpu in np.unique(gpus).tolist():
        for number, name in enumerate(names.tolist()):
            places = np.flatnonzero((of_row == number) & (gpus == gpu))
            if len(places):
                places = places[np.argsort(times_ns[places], kind="stable")]
                found[name, gpu] = times_ns[places], values[places]
    return found


def _drawn(
    series: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]],
    names: Mapping[str, str],
    factor: float,
    is_growth: bool,
) -> list[tuple[str, int, np.ndarray, np.ndarray]]:
    drawn = []
    for (name, gpu), (times_ns, values) in series.items():
        if name not in names:
            continue
        shown = values * factor
        if is_growth:
            if len(values) < 2:
                continue
            seconds = np.maximum(np.diff(times_ns) / 1e9, 1e-3)
            # A counter that falls was reset: what it had grown by is not known.
            shown, times_ns = np.where(np.diff(shown) >= 0, np.diff(shown) / seconds, np.nan), times_ns[1:]
        drawn.append((names[name], gpu, times_ns, shown))
    return drawn


def _curve(name: str, gpu: int, seconds: np.ndarray, values: np.ndarray, axes: Row) -> Row:
    places = fewer(values, _MOST_POINTS)
    label = f"GPU {gpu} {name}" if gpu >= 0 else name
    place = gpu if gpu >= 0 else int(name in ("out", "drops", "errors"))
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "x": packed(seconds[places]),
        "y": packed(values[places]),
        **axes,
        "line": {"color": PALETTE[place % len(PALETTE)], "width": 1.5, "dash": _DASHES[place // 2 % len(_DASHES)]},
        "hovertemplate": f"{label} %{{y:.4g}} after %{{x:.4g}} s<extra></extra>",
    }


def _span_of(values: Sequence[np.ndarray]) -> str:
    known = np.concatenate(values)
    known = known[np.isfinite(known)]
    if not known.size:
        return "not known"
    return f"{known.min():.3g} to {known.max():.3g}" if known.min() < known.max() else f"{known.max():.3g}"


def host_step_times(times: pa.Table, ranks: Sequence[int], host: str) -> Figure:
    """How long the ranks of a host compute in each step, and, dashed, the median of those that do the same work.

    Args:
        times: `rank`, `step`, `own_s` (forward and backward, without waiting) and `peers_s`, the median of its stage.
    """
    title = f"Own time of a step on {host}"
    columns: dict[str, Any] = {name: times[name].to_numpy() for name in ("rank", "step", "own_s", "peers_s")}
    own = np.isin(columns["rank"], list(ranks))
    if not own.any():
        return empty(title, "its ranks computed nothing in these steps")
    traces: list[Row] = []
    worst, excess = -1, 0.0
    for number, rank in enumerate(ranks):
        places = np.flatnonzero(columns["rank"] == rank)
        if not len(places):
            continue
        places = places[np.argsort(columns["step"][places])]
        ratio = float(np.median(columns["own_s"][places] / columns["peers_s"][places])) - 1
        if worst < 0 or ratio > excess:
            worst, excess = rank, ratio
        traces.append(_rank_curve(columns, places, rank, number))
    places = np.flatnonzero(own)
    steps, first = np.unique(columns["step"][places], return_index=True)
    median = {
        "type": "scatter",
        "mode": "lines",
        "name": "median of those that do the same",
        "x": packed(steps),
        "y": packed(columns["peers_s"][places[first]]),
        "line": {"color": "#7F7F7F", "width": 2, "dash": "dash"},
        "hovertemplate": "median %{y:.4g} s<extra></extra>",
    }
    told = f"rank {worst} takes {abs(excess):.1%} {'longer' if excess >= 0 else 'less long'} than the median"
    return figure(
        [*traces, median],
        f"{title}: {told}",
        height=340,
        description=f"{title}, {len(traces)} ranks over steps {steps[0]} to {steps[-1]}: {told}",
        hovermode="x unified",
        xaxis=axis("step"),
        yaxis=axis("seconds computing", rangemode="tozero"),
    )


def _rank_curve(columns: Mapping[str, np.ndarray], places: np.ndarray, rank: int, number: int) -> Row:
    color = PALETTE[number % len(PALETTE)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"rank {rank}",
        "x": packed(columns["step"][places]),
        "y": packed(columns["own_s"][places]),
        "line": {"color": color, "width": 1.5},
        "marker": {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 6, "color": color},
        "hovertemplate": f"rank {rank} %{{y:.4g}} s<extra></extra>",
    }
