"""Where the time of a step went, beside where it was expected to go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pyarrow as pa

from phalanx.figures.style import PALETTE, Figure, Row, axis, empty, figure
from phalanx.telemetry.span_store import PARTS

_PARTS = (*PARTS, "other")
_NAMES = {
    "data": "waiting for data",
    "wait": "waiting for communication",
    "passes": "forward and backward",
}


def expected_beside_measured(expected_s: Mapping[str, float], measured: pa.Table) -> Figure:
    """Seconds of a step by what they went on: predicted, and as spans say.

    Args:
        expected_s: by kind of span (``forward``, ``wait`` …); kinds that are not there were not predicted. Empty:
            only what was measured is drawn.
        measured: one row with ``forward_s`` … and ``step_s`` (`Trace.step_breakdown`); no row, or nulls: not measured.
    """
    row = measured.to_pylist()[0] if measured.num_rows else {}
    measured_s = {name[:-2]: value for name, value in row.items() if name.endswith("_s") and _is_number(value)}
    expected_s = {name: value for name, value in expected_s.items() if _is_number(value)}
    others = sorted((expected_s.keys() | measured_s.keys()) - {*_PARTS, "step"})
    parts = [part for part in (*_PARTS, *others) if measured_s.get(part) or expected_s.get(part)]
    if not parts:
        return empty("A step, expected and measured", "neither was a step measured nor one predicted")
    step_s = measured_s.get("step", sum(measured_s.get(part, 0.0) for part in parts))
    wanted_s = expected_s.get("step", sum(expected_s.get(part, 0.0) for part in parts))
    title = _title(step_s if measured_s else None, wanted_s if expected_s else None)
    names = [_NAMES.get(part, part) for part in parts]
    most_s = max([*(measured_s.get(part, 0.0) for part in parts), *(expected_s.get(part, 0.0) for part in parts)])
    traces = []  # Plotly stacks the bars of a part from below
    if measured_s:
        look: dict[str, object] = {"color": PALETTE[1]}
        traces.append(_bars("measured", names, [measured_s.get(part) for part in parts], look, parts, expected_s))
    if expected_s:
        look = {"color": "rgba(0,0,0,0)", "line": {"color": PALETTE[0], "width": 2}}
        traces.append(_bars("expected", names, [expected_s.get(part) for part in parts], look, parts, None))
    return figure(
        traces,
        title,
        height=130 + 48 * len(parts),
        description=f"{title}; {_differences(parts, expected_s, measured_s)}",
        barmode="group",
        bargap=0.25,
        xaxis=axis("seconds of a step", range=[0, 1.4 * most_s]),
        yaxis=axis(categoryorder="array", categoryarray=names[::-1]),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _title(step_s: float | None, wanted_s: float | None) -> str:
    if step_s is None:
        return f"A step: {wanted_s:.4g} s expected, not measured yet"
    if not wanted_s:
        return f"A step: {step_s:.4g} s measured, no prediction"
    return f"A step: {step_s:.4g} s measured, {wanted_s:.4g} s expected ({100 * (step_s / wanted_s - 1):+.1f} %)"


def _bars(
    name: str,
    names: Sequence[str],
    seconds: Sequence[float | None],
    look: Mapping[str, object],
    parts: Sequence[str],
    expected_s: Mapping[str, float] | None,
) -> Row:
    """One of the two bars of each part; the measured one says beside it by how much it differs."""
    texts = []
    for part, value in zip(parts, seconds, strict=True):
        wanted = (expected_s or {}).get(part)
        texts.append(
            "" if value is None else f"{value:.4g} s" + (f" ({100 * (value / wanted - 1):+.0f} %)" if wanted else "")
        )
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": list(seconds),
        "y": list(names),
        "text": texts,
        "textposition": "outside",
        "cliponaxis": False,
        "marker": dict(look),
        "hovertemplate": f"{name}: %{{y}}, %{{x:.4g}} s<extra></extra>",
    }


def _differences(parts: Sequence[str], expected_s: Mapping[str, float], measured_s: Mapping[str, float]) -> str:
    """The three parts that differ most."""
    both = [part for part in parts if part in expected_s and part in measured_s]
    if not both:
        return ", ".join(f"{part} {measured_s.get(part, expected_s.get(part, 0.0)):.4g} s" for part in parts)
    both.sort(key=lambda part: -abs(measured_s[part] - expected_s[part]))
    return "largest differences: " + ", ".join(
        f"{part} {measured_s[part] - expected_s[part]:+.4g} s" for part in both[:3]
    )
