"""What failures cost a job: attempts and incidents in time, and how much of all time trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from phalanx.figures.style import HATCHED, LOSS_COLORS, PALETTE, SYMBOLS, Figure, Row, axis, empty, figure

_MOST_BARS = 40
_PROGRESS_PIXELS, _BETWEEN_PIXELS = 240, 80
_HATCHES = ("", "/", "\\", "x", "-", "|", "+", ".")
_PHASES = (
    ("detect_s", "until it was noticed", LOSS_COLORS["detection"], ""),
    ("restart_s", "until training went on", LOSS_COLORS["restart"], "/"),
    ("again_s", "steps made again", LOSS_COLORS["made again"], "x"),
)


def recovery_history(attempts: Sequence[Row], incidents: Sequence[Row]) -> Figure:
    """Above, how far training was at what time, a line for each attempt; below, what each incident cost.

    Args:
        attempts: `attempt`, `start_s` and `end_s` (Unix; where it still goes on: of its last step), and
            `first_step` and `last_step`.
        incidents: `at_s` (Unix), `what`, and seconds `detect_s` (from the fault until it was noticed), `restart_s`
            (from then until training went on), `again_s` (to make lost steps again), None or NaN where not known; and
            `lost_steps` (None: not known); `step`, where it did not end the attempt. Of more than 40 the newest are
            drawn, which the title says.
    """
    if not attempts:
        return empty("Recoveries", "no attempt has started")
    origin_s = min(row["start_s"] for row in attempts)
    latest_s = max([row["end_s"] for row in attempts] + [row["at_s"] for row in incidents])
    per_unit, unit = (3600.0, "hours") if latest_s - origin_s > 10_800 else (60.0, "minutes")
    shown = list(incidents)[-_MOST_BARS:]
    labels = [f"{len(incidents) - len(shown) + number}. {_short(row['what'])}" for number, row in enumerate(shown, 1)]
    traces: list[Row] = [_progress(attempts, origin_s, per_unit, unit)]
    if incidents:
        traces.append(_fault_marks(attempts, incidents, origin_s, per_unit, unit))
    traces += [trace for trace in (_phase(shown, labels, *phase) for phase in _PHASES) if any(trace["x"])]
    bars = 30 * max(len(shown), 2) if shown else 0
    whole = _PROGRESS_PIXELS + (_BETWEEN_PIXELS + bars) * bool(shown)
    told = _told(attempts, incidents)
    left_out = f" (the newest {len(shown)} are drawn)" if len(incidents) > len(shown) else ""
    layout: dict[str, object] = {}
    if shown:
        # Plotly's rows grow from below: the newest incident comes last, as time does.
        layout["yaxis2"] = axis(domain=[0.0, bars / whole], categoryorder="array", categoryarray=labels[::-1])
        layout["xaxis2"] = axis("seconds that an incident cost", anchor="y2", rangemode="tozero")
    return figure(
        traces,
        f"{told}{left_out}",
        height=whole + 130,
        description=told,
        barmode="stack",
        bargap=0.3,
        xaxis=axis(f"{unit} since the first start", anchor="y", rangemode="tozero"),
        yaxis=axis("step", domain=[1 - _PROGRESS_PIXELS / whole, 1.0], rangemode="tozero"),
        **layout,
    )


def _progress(attempts: Sequence[Row], origin_s: float, per_unit: float, unit: str) -> Row:
    """A line that breaks, and falls back, where an attempt ended."""
    x: list[float | None] = []
    y: list[float | None] = []
    texts: list[str] = []
    for row in attempts:
        x += [(row["start_s"] - origin_s) / per_unit, (row["end_s"] - origin_s) / per_unit, None]
        y += [row["first_step"], row["last_step"], None]
        texts += [f"attempt {row['attempt']} starts", f"attempt {row['attempt']}, last step", ""]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "progress of an attempt",
        "x": x,
        "y": y,
        "text": texts,
        "line": {"color": PALETTE[0], "width": 2},
        "marker": {"size": 6},
        "hovertemplate": f"%{{text}}<br>step %{{y}} after %{{x:.4g}} {unit}<extra></extra>",
    }


def _fault_marks(attempts: Sequence[Row], incidents: Sequence[Row], origin_s: float, per_unit: float, unit: str) -> Row:
    """A cross at each incident, at its step, or at the last step of the attempt that it ended."""
    steps = []
    for row in incidents:
        begun = [one for one in attempts if one["start_s"] <= row["at_s"]] or [attempts[0]]
        steps.append(row.get("step", max(begun, key=lambda one: one["start_s"])["last_step"]))
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "incident",
        "x": [(row["at_s"] - origin_s) / per_unit for row in incidents],
        "y": steps,
        "text": [f"{row['what']}, {_steps(row['lost_steps'])} lost" for row in incidents],
        "marker": {"symbol": SYMBOLS[4], "size": 11, "color": PALETTE[3]},
        "hovertemplate": f"%{{text}}<br>after %{{x:.4g}} {unit}<extra></extra>",
    }


def _phase(shown: Sequence[Row], labels: Sequence[str], key: str, name: str, color: str, hatch: str) -> Row:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "xaxis": "x2",
        "yaxis": "y2",
        "x": [_known(row.get(key)) for row in shown],
        "y": list(labels),
        "customdata": [_steps(row["lost_steps"]) for row in shown],
        "marker": {"color": color, "pattern": {**HATCHED, "shape": hatch}},
        "hovertemplate": f"%{{y}}<br>{name}: %{{x:.4g}} s; %{{customdata}} lost<extra></extra>",
    }


def _known(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _short(text: str) -> str:
    return text if len(text) <= 42 else text[:41] + "…"


def _told(attempts: Sequence[Row], incidents: Sequence[Row]) -> str:
    many = f"{len(attempts)} attempt{'s' * (len(attempts) > 1)}, {len(incidents)} incident{'s' * (len(incidents) != 1)}"
    if not incidents:
        return many
    parts = []
    for key, name, *_ in _PHASES[:2]:
        if known := sorted(
            _known(row[key]) for row in incidents if row.get(key) is not None and math.isfinite(row[key])
        ):
            parts.append(f"median {known[len(known) // 2]:.3g} s {name}")
    lost = [row["lost_steps"] for row in incidents]
    unknown = lost.count(None)
    parts += [f"{_steps(sum(steps or 0 for steps in lost))} lost"] if unknown < len(lost) else []
    parts += [f"the steps that {unknown} of them lost are not known"] if unknown else []
    return ", ".join([many, *parts])


def _steps(count: int | None) -> str:
    return "an unknown number of steps" if count is None else f"{count:,} step{'s' * (count != 1)}"


def effective_time(rows: Sequence[Row]) -> Figure:
    """How much of a job's time ended in steps that are kept, and what the rest went on: a bar for each run, in parts.

    Args:
        rows: `run`, `part` (``training`` is what counts, others are losses by cause), `seconds`.
    """
    known = [row for row in rows if _known(row["seconds"]) > 0]
    runs = list(dict.fromkeys(row["run"] for row in known))
    if not runs:
        return empty("Effective training time", "no time has passed")
    totals = {run: sum(row["seconds"] for row in known if row["run"] == run) for run in runs}
    by_part: dict[str, dict[str, float]] = {}
    for row in known:
        of_part = by_part.setdefault(row["part"], {})
        of_part[row["run"]] = of_part.get(row["run"], 0.0) + row["seconds"]
    parts = sorted(by_part, key=lambda part: (part != "training", -sum(by_part[part].values())))
    per_unit, unit = (3600.0, "hours") if max(totals.values()) > 10_800 else (60.0, "minutes")
    shares = {run: 100 * by_part.get("training", {}).get(run, 0.0) / totals[run] for run in runs}
    told = "; ".join(_run_told(run, by_part, parts, totals[run], len(runs) > 1) for run in runs[:3])
    short = told if len(runs) == 1 else ", ".join(f"{run} {shares[run]:.1f} %" for run in runs[:3])
    short += f" and {len(runs) - 3} more runs" if len(runs) > 3 else ""
    return figure(
        [_part(part, number, runs, by_part[part], totals, per_unit, unit) for number, part in enumerate(parts)],
        f"Effective training time: {short}",
        height=170 + 44 * len(runs),
        description=f"Effective training time: {told}",
        barmode="stack",
        bargap=0.3,
        xaxis=axis(f"{unit} since the first start", rangemode="tozero"),
        yaxis=axis(categoryorder="array", categoryarray=runs[::-1]),
    )


def _part(
    part: str,
    number: int,
    runs: Sequence[str],
    seconds: Mapping[str, float],
    totals: Mapping[str, float],
    per_unit: float,
    unit: str,
) -> Row:
    shares = [100 * seconds.get(run, 0.0) / totals[run] for run in runs]
    color = LOSS_COLORS.get(part, PALETTE[(number + 3) % len(PALETTE)])
    hatch = "" if part == "training" else _HATCHES[1 + (number - 1) % (len(_HATCHES) - 1)]
    return {
        "type": "bar",
        "orientation": "h",
        "name": part,
        "x": [seconds.get(run, 0.0) / per_unit for run in runs],
        "y": list(runs),
        "text": [f"{part} {share:.1f} %" if share >= 12 else "" for share in shares],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "customdata": shares,
        "marker": {"color": color, "pattern": {**HATCHED, "shape": hatch}},
        "hovertemplate": f"{part}: %{{x:.4g}} {unit}, %{{customdata:.2f}} %<extra>%{{y}}</extra>",
    }


def _run_told(
    run: str, by_part: Mapping[str, Mapping[str, float]], parts: Sequence[str], total_s: float, is_named: bool
) -> str:
    shares = {part: 100 * by_part[part].get(run, 0.0) / total_s for part in parts}
    losses = sorted(((share, part) for part, share in shares.items() if part != "training" and share > 0), reverse=True)
    lost = ", ".join(f"{part} {share:.1f} %" for share, part in losses[:3])
    return (
        (f"{run} " if is_named else "") + f"{shares.get('training', 0.0):.1f} %" + (f" (lost: {lost})" if lost else "")
    )
