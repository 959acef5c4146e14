"""Curves of many runs, overlaid: smoothed, cut down to what a screen shows, with marks of what happened to the runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from phalanx.figures.series import fewer, packed, smoothed
from phalanx.figures.style import PALETTE, SYMBOLS, Figure, Row, axis, empty, figure

X = Literal["step", "tokens", "time_s", "flops"]
Columns: TypeAlias = pa.Table | Mapping[str, Any]
"""Of a run, by name: ``step`` and others of the same length. None (null) is a step without it, NaN a broken number."""

_SYMBOLS_PER_RUN = 8
_MOST_NAMED = 24
"""With more runs a legend hides the curves; names are then shown where one points."""
_MOST_RAW = 8
_MOST_SVG_POINTS = 50_000
_MARKS = {
    "checkpoint": ("triangle-up", "#7F7F7F"),
    "resume": ("diamond-open", "#0072B2"),
    "skipped step": ("x-thin-open", "#D55E00"),
    "incident": ("star", "#D55E00"),
    "not finite": ("x", "#CC79A7"),
}
"""A symbol and a colour; all stand on the curve, but for numbers that are none, which stand below it."""


def columns_of(entries: Iterable[Row]) -> pa.Table:
    """The lines of a metrics.jsonl as columns: a row for each step, with what was evaluated after it.

    Numbers that JSON has not (``"not_finite": {"loss": "nan"}``) are there again; texts are left out.
    """
    rows: dict[int, dict[str, float]] = {}
    for entry in entries:
        if entry["kind"] in ("step", "evaluation"):
            row = rows.setdefault(entry["step"], {})
            row.update({name: value for name, value in entry.items() if isinstance(value, int | float)})
            row.update({name: float(text) for name, text in entry.get("not_finite", {}).items()})
    names = dict.fromkeys(name for row in rows.values() for name in row)
    ordered = [rows[step] for step in sorted(rows)]
    columns = {name: pa.array([row.get(name) for row in ordered], pa.float64()) for name in names if name != "step"}
    return pa.table({"step": pa.array([int(row["step"]) for row in ordered], pa.int64()), **columns})


def marks_of(run: str, entries: Iterable[Row]) -> list[Row]:
    """Marks that a metrics.jsonl tells of: durable checkpoints, starts that went on from one, steps left out."""
    marks: list[Row] = []
    for entry in entries:
        step = entry["step"]
        if entry["kind"] == "checkpoint":
            marks.append({"run": run, "kind": "checkpoint", "step": step, "text": entry.get("checkpoint/name", "")})
        elif entry["kind"] == "start" and step > 0:
            marks.append({"run": run, "kind": "resume", "step": step, "text": f"went on from step {step}"})
        elif entry["kind"] == "step" and entry.get("skipped"):
            marks.append({"run": run, "kind": "skipped step", "step": step, "text": "update left out as bad"})
    return marks


def curves(
    runs: Mapping[str, Columns],
    column: str,
    *,
    unit: str = "",
    x: X = "step",
    span: float = 1,
    points: int = 2000,
    marks: Sequence[Row] = (),
    is_log: bool = False,
) -> Figure:
    """One column of many runs over steps, tokens, time or FLOPs.

    Args:
        runs: by name, the columns of each. Time is ``time_s``, or else the sum of ``step_s``, which leaves out what is
            not training; runs without `column` or `x` are left out, which the title says.
        unit: of the column, for the axis.
        span: of the exponential moving average, in steps; 1: none. Up to 8 runs show behind it what was smoothed.
        points: of a curve at most; the least and the most of each stretch stay, so that no spike is lost.
        marks: `run`, `kind` (checkpoint, resume, skipped step, incident), `step` and `text`.
    """
    found = [curve for name, columns in runs.items() if (curve := _curve(name, columns, column, x, span)) is not None]
    if not found:
        return empty(column, f"no run of {len(runs)} has {column} over {_X_NAMES[x]}" if runs else "no runs")
    scale, x_title = _x_scale(found, x)
    is_many = len(found) > _MOST_NAMED
    kept = [fewer(curve.y, points) for curve in found]
    kind = "scattergl" if sum(map(len, kept)) > _MOST_SVG_POINTS else "scatter"
    traces: list[Row] = []
    if span > 1 and len(found) <= _MOST_RAW:
        traces += [_raw(curve, number, scale, points) for number, curve in enumerate(found)]
    traces += [
        _line(curve, number, places, scale, kind)
        for number, (curve, places) in enumerate(zip(found, kept, strict=True))
    ]
    if not is_many:
        traces += [_symbols(curve, number, scale, len(found)) for number, curve in enumerate(found)]
    traces += _marks(found, marks, scale)
    smoothing = f", smoothed over {span:g} steps" if span > 1 else ""
    missing = f" ({len(runs) - len(found)} more have none)" if len(runs) > len(found) else ""
    several = f" of {len(found)} runs" if len(found) > 1 else f" of {found[0].name}"
    y_title = f"{column.replace('_', ' ')}, {unit}" if unit else column.replace("_", " ")
    return figure(
        traces,
        f"{column.replace('_', ' ')}{several} over {_X_NAMES[x]}{smoothing}{missing}",
        height=420,
        description=_told(found, column.replace("_", " "), f"over {_X_NAMES[x]}{smoothing}"),
        hovermode="closest",
        showlegend=not is_many,
        xaxis=axis(x_title),
        yaxis=axis(y_title, type="log") if is_log else axis(y_title),
    )


_X_NAMES = {"step": "steps", "tokens": "tokens", "time_s": "time", "flops": "FLOPs"}


@dataclass(frozen=True)
class _Curve:
    """Arrays of equal length; `raw` is what `y` is smoothed from."""

    name: str
    step: np.ndarray
    x: np.ndarray
    y: np.ndarray
    raw: np.ndarray


def _curve(name: str, columns: Columns, column: str, x: X, span: float) -> _Curve | None:
    names = columns.column_names if isinstance(columns, pa.Table) else columns.keys()
    y_values, is_there = _numbers(columns[column]) if column in names else (np.zeros(0), np.zeros(0, bool))
    if not is_there.any():
        return None
    if x in names:
        x_values, x_there = _numbers(columns[x])
    elif x == "time_s" and "step_s" in names:
        step_s, x_there = _numbers(columns["step_s"])
        x_values, x_there = np.cumsum(np.where(x_there & np.isfinite(step_s), step_s, 0.0)), np.ones_like(x_there)
    else:
        return None
    used = is_there & x_there & np.isfinite(x_values)
    if not used.any():
        return None
    step = x_values if x == "step" else _numbers(columns["step"])[0]
    if not used.all():  # of long runs copies take as long as all else
        step, x_values, y_values = step[used], x_values[used], y_values[used]
    is_number = np.isfinite(y_values)
    raw = y_values if is_number.all() else np.where(is_number, y_values, np.nan)
    # The span is in steps, of which an evaluation stands for many.
    steps_per_row = max((float(step[-1]) - float(step[0])) / max(len(step) - 1, 1), 1.0)
    return _Curve(name, step, x_values, smoothed(raw, span / steps_per_row), raw)


def _numbers(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """A column as floats, and where it has a value at all."""
    if isinstance(values, pa.ChunkedArray | pa.Array):
        is_there = np.ones(len(values), bool) if not values.null_count else values.is_valid().to_numpy(False)
        return np.asarray(values.to_numpy(zero_copy_only=False), float), is_there
    if isinstance(values, np.ndarray) and values.dtype.kind != "O":
        return values.astype(float, copy=False), np.ones(len(values), bool)
    return np.array(values, float), np.array([value is not None for value in values], bool)


def _x_scale(found: Sequence[_Curve], x: X) -> tuple[float, str]:
    """By how much x is divided, and the title of its axis."""
    if x != "time_s":
        return 1.0, {"step": "step", "tokens": "tokens", "flops": "FLOPs"}[x]
    most_s = max(float(curve.x[-1]) for curve in found)
    scale, name = next(((s, n) for s, n in ((3600.0, "hours"), (60.0, "minutes")) if most_s > 3 * s), (1.0, "seconds"))
    return scale, f"{name} of training"


def _line(curve: _Curve, number: int, places: np.ndarray, scale: float, kind: str) -> Row:
    return {
        "type": kind,
        "mode": "lines",
        "name": curve.name,
        "legendgroup": curve.name,
        "showlegend": False,
        "x": packed(curve.x[places] / scale),
        "y": packed(curve.y[places]),
        "line": {"color": PALETTE[number % len(PALETTE)], "width": 1.8},
        "hovertemplate": "%{y:.5g} at %{x}<extra>%{fullData.name}</extra>",
    }


def _raw(curve: _Curve, number: int, scale: float, points: int) -> Row:
    places = fewer(curve.raw, points)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{curve.name}, not smoothed",
        "legendgroup": curve.name,
        "showlegend": False,
        "x": packed(curve.x[places] / scale),
        "y": packed(curve.raw[places]),
        "line": {"color": PALETTE[number % len(PALETTE)], "width": 1},
        "opacity": 0.25,
        "hoverinfo": "skip",
    }


def _symbols(curve: _Curve, number: int, scale: float, runs: int) -> Row:
    """A few symbols on the curve, and its entry in the legend: runs are told apart by more than their colour."""
    # From run to run a little further along, so that symbols of curves that lie on each other do not.
    span = max(len(curve.y) - 1, 0)
    shares = (np.arange(_SYMBOLS_PER_RUN) + (number + 0.5) / runs) / _SYMBOLS_PER_RUN
    places = np.unique(np.round(span * shares).astype(int))
    return {
        "type": "scatter",
        "mode": "markers",
        "name": curve.name,
        "legendgroup": curve.name,
        "x": packed(curve.x[places] / scale),
        "y": packed(curve.y[places]),
        "marker": {"color": PALETTE[number % len(PALETTE)], "symbol": SYMBOLS[number % len(SYMBOLS)], "size": 8},
        "hoverinfo": "skip",
    }


def _marks(found: Sequence[_Curve], marks: Sequence[Row], scale: float) -> list[Row]:
    """A trace for each kind of mark, at the curve of its run; what lies before or after the curve, at its ends."""
    by_name = {curve.name: curve for curve in found}
    points: dict[str, list[tuple[float, float | None, str]]] = {}
    for mark in marks:
        curve = by_name.get(mark["run"])
        if curve is None:
            continue
        place = max(int(np.searchsorted(curve.step, mark["step"], side="right")) - 1, 0)
        text = f"{mark['kind']}, {curve.name}, step {mark['step']}" + (f"<br>{mark['text']}" if mark["text"] else "")
        points.setdefault(mark["kind"], []).append((curve.x[place] / scale, _last_number(curve, place), text))
    for curve in found:
        if (broken := np.flatnonzero(np.isnan(curve.raw))).size:
            first = broken[fewer(np.zeros(len(broken)), 200)]
            points.setdefault("not finite", []).extend(
                (curve.x[i] / scale, _last_number(curve, i), f"not finite, {curve.name}, step {curve.step[i]:.0f}")
                for i in first
            )
    traces: list[Row] = []
    for kind, of_kind in points.items():
        symbol, color = _MARKS.get(kind, ("star", PALETTE[7]))
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind,
                "x": [x for x, _, _ in of_kind],
                "y": [y for _, y, _ in of_kind],
                "text": [text for _, _, text in of_kind],
                "marker": {
                    "symbol": symbol,
                    "color": color,
                    "size": 11,
                    "line": {"width": 2 * symbol.endswith("open"), "color": color},
                },
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    return traces


def _last_number(curve: _Curve, place: int) -> float | None:
    """What the curve has at `place`, or had last before it; its first number where there was none yet."""
    if np.isfinite(curve.y[place]):
        return float(curve.y[place])
    before = np.flatnonzero(np.isfinite(curve.y[: place + 1]))
    after = np.flatnonzero(np.isfinite(curve.y)) if not before.size else before[-1:]
    return float(curve.y[after[0]]) if after.size else None


def _told(found: Sequence[_Curve], what: str, how: str) -> str:
    ends = [(curve.name, value) for curve in found if (value := _last_number(curve, len(curve.y) - 1)) is not None]
    if len(ends) <= 6:
        return f"{what} {how}: " + ", ".join(f"{name} ends at {value:.4g}" for name, value in ends)
    ends.sort(key=lambda end: end[1])
    (low, least), (high, most) = ends[0], ends[-1]
    return f"{what} of {len(found)} runs {how}: {low} ends lowest at {least:.4g}, {high} highest at {most:.4g}"
