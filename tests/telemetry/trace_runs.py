"""Run folders with spans of which everything is known."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from phalanx.telemetry.queries import Trace
from phalanx.telemetry.span_store import SPANS, sums, write_part

MS = 1_000_000
SHARED = Path(__file__).parents[3] / "shared/data/traces"


def span(rank: int, step: int, kind: str, start_ms: float, end_ms: float, **more: Any) -> dict[str, Any]:
    """A row of `SPANS`; times in milliseconds from 1000 s."""
    base_ns = 1000 * 10**9
    row = {"host": f"host{rank // 2}", "attempt": 0, "name": "", "group": "", "chunk": -1, "micro_batch": -1}
    row |= {"peer": -1, "bytes": 0, "rank": rank, "step": step, "kind": kind}
    return row | {"start_ns": base_ns + round(start_ms * MS), "end_ns": base_ns + round(end_ms * MS)} | more


def table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as `SPANS`."""
    return pa.Table.from_pylist(list(rows), schema=SPANS)


def write_run(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
    metrics: Sequence[Mapping[str, Any]] = (),
) -> Trace:
    """A run as its hosts' writers leave it.

    Args:
        groups: by axes, members of each group.
    """
    telemetry = folder / "telemetry"
    parts = sorted({(row["host"], row["attempt"]) for row in rows})
    for number, (host, attempt) in enumerate(parts):
        own = table(row for row in rows if (row["host"], row["attempt"]) == (host, attempt))
        for name, part in zip(("spans", "phases", "steps"), (own, *sums(own)), strict=True):
            write_part(telemetry, name, host, part, attempt, number)
    lines = [
        json.dumps({"rank": rank, "attempt": 0, "group": group, "ranks": members})
        for group, all_members in (groups or {}).items()
        for members in all_members
        for rank in members
    ]
    (telemetry / "groups").mkdir(parents=True, exist_ok=True)
    (telemetry / "groups" / "host0.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return Trace.open(folder)


def four_ranks(steps: int = 6, slow: Mapping[int, float] | None = None) -> list[dict[str, Any]]:
    """Two stages of two ranks (0 and 1, 2 and 3): 5 ms data, forward 20 ms, transfer, backward 40 ms, optimizer 10 ms.

    Args:
        slow: factors of forward and backward by rank; all wait for the slowest at the end.
    """
    rows = []
    for step in range(steps):
        begin = 200.0 * step
        for rank in range(4):
            factor = (slow or {}).get(rank, 1.0)
            at = begin + 5.0
            rows += [span(rank, step, "step", begin, begin + 190.0), span(rank, step, "data", begin, at)]
            forward, backward = 20.0 * factor, 40.0 * factor
            rows.append(span(rank, step, "forward", at, at + forward, micro_batch=0, chunk=0))
            at += forward
            peer, verb = (rank + 2, "send") if rank < 2 else (rank - 2, "recv")
            transfer = {
                "name": f"{verb} activations",
                "group": "pipeline",
                "peer": peer,
                "micro_batch": 0,
                "bytes": 4096,
            }
            rows.append(span(rank, step, "collective", at, at + 4.0, **transfer))
            rows.append(span(rank, step, "wait", at, at + 4.0, name="activations", group="pipeline"))
            at += 4.0
            rows.append(span(rank, step, "backward", at, at + backward, micro_batch=0, chunk=0))
            at += backward
            reduce = {"name": "reduce_scatter", "group": "shard"}
            rows.append(span(rank, step, "collective", at, begin + 170.0, **reduce, bytes=8192))
            rows.append(span(rank, step, "wait", at, begin + 170.0, **reduce))
            rows.append(span(rank, step, "optimizer", begin + 170.0, begin + 180.0))
    return rows


GROUPS = {"pipeline": [[0, 2], [1, 3]], "shard": [[0, 1], [2, 3]]}
