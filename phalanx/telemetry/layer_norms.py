"""Norms of each layer's weights, gradients and activations, in ``RUN/telemetry/norms.jsonl``: a line for each step.

    {"step": 100, "weight": {"blocks.0": 11.3, …}, "gradient": {…}, "activation": {…}}

Numbers that are not finite are texts (``"nan"``), as in ``metrics.jsonl``. A step that was done again counts as it was
done last.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.telemetry.loggers import parse_line

if TYPE_CHECKING:
    import pyarrow as pa

QUANTITIES = ("weight", "gradient", "activation")

_FILE = Path("telemetry") / "norms.jsonl"


def append_norms(run: Path, step: int, norms: Mapping[str, Mapping[str, float]]) -> None:
    """Add the norms of a step, by quantity and layer.

    Raises:
        OSError: the file cannot be written.
    """
    told = {
        quantity: {layer: value if math.isfinite(value) else repr(value) for layer, value in by_layer.items()}
        for quantity, by_layer in norms.items()
    }
    line = json.dumps({"kind": "norms", "step": step, **told}) + "\n"
    path = run / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_norms(run: Path) -> pa.Table:
    """All norms of a run, a row for each step, layer and quantity, with its value; empty where none were written."""
    import pyarrow as pa  # here, since training writes norms: pyarrow's threads keep ranks from being forked

    schema = pa.schema(
        [("step", pa.int64()), ("layer", pa.string()), ("quantity", pa.string()), ("value", pa.float64())]
    )
    rows: dict[int, list[dict[str, object]]] = {}
    try:
        lines = (run / _FILE).read_bytes().splitlines(keepends=True)
    except OSError:
        lines = []
    for entry in filter(None, map(parse_line, lines)):
        rows[entry["step"]] = [
            {"step": entry["step"], "layer": layer, "quantity": quantity, "value": float(value)}
            for quantity in QUANTITIES
            for layer, value in (entry.get(quantity) or {}).items()
        ]
    return pa.Table.from_pylist([row for step in sorted(rows) for row in rows[step]], schema=schema)
