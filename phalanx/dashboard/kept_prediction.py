"""What a run keeps of its prediction (``prediction.json``), beside what its spans say that a step went on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from phalanx.core.files import read_regular

FILE = "prediction.json"
_MOST_BYTES = 16 << 20

SPANS_OF_PART = {
    "passes": "passes",
    "waiting": "wait",
    "optimizer": "optimizer",
    "loader": "data",
    "between_steps": "other",
}
"""Parts of a step that training predicts, and what spans call them; `passes` are forward and backward together."""


def read_prediction(run: Path) -> dict[str, Any] | None:
    """The file of a run; None: it has none that can be read."""
    try:
        found = json.loads(read_regular(run / FILE, _MOST_BYTES))
        return found if isinstance(found["expected"]["parts"], dict) and number(found["expected"]["step_s"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def number(value: Any) -> float | None:
    """A finite number; None: it is something else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def expected_parts(prediction: Mapping[str, Any] | None) -> dict[str, float]:
    """Seconds of a step by what spans call its parts, and ``step``; empty: nothing was predicted."""
    if prediction is None:
        return {}
    expected = prediction["expected"]
    parts = {
        SPANS_OF_PART[name.removesuffix("_s")]: float(seconds)
        for name, seconds in expected["parts"].items()
        if name.removesuffix("_s") in SPANS_OF_PART and number(seconds) is not None
    }
    return {**parts, "step": float(expected["step_s"])}


def measured_parts(breakdown: pa.Table, *, as_predicted: bool) -> pa.Table:
    """`Trace.step_breakdown` for a figure; with `as_predicted` forward and backward are one part, ``passes_s``."""
    row = breakdown.to_pylist()[0] if breakdown.num_rows else {}
    if not row or row.get("step_s") is None:
        return pa.table({})
    if as_predicted:
        row["passes_s"] = (row.pop("forward_s") or 0.0) + (row.pop("backward_s") or 0.0)
    row.pop("rank_steps", None)
    return pa.Table.from_pylist([row])
