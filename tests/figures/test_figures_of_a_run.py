"""From the files of a run to its figures: what queries give is what figures take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.graph_objects
import pyarrow as pa
import pytest

from phalanx.figures.communication import communication_matrix
from phalanx.figures.merged_timeline import merged_timeline
from phalanx.figures.rank_heatmap import rank_heatmap
from phalanx.figures.step_parts import expected_beside_measured
from phalanx.figures.style import Figure, described
from phalanx.telemetry.queries import Trace
from phalanx.telemetry.span_store import SPANS, sums, write_part

MS = 1_000_000
BEGIN_NS = 1_700_000_000_000 * MS


def _spans_of(rank: int, step: int) -> list[dict[str, Any]]:
    """100 ms: forward 20 (on rank 2: 30), backward 40, then waiting for the others, and the update."""
    begin = BEGIN_NS + step * 100 * MS
    slow = 10 * (rank == 2)
    none = {"host": "node-a", "attempt": 0, "rank": rank, "step": step, "name": "", "group": "", "bytes": 0}
    none |= dict.fromkeys(("chunk", "micro_batch", "peer"), -1)
    parts = [("step", 0, 100), ("forward", 0, 20 + slow), ("backward", 20 + slow, 60 + slow), ("wait", 60 + slow, 90)]
    parts += [("optimizer", 90, 98)]
    spans = [none | {"kind": kind, "start_ns": begin + a * MS, "end_ns": begin + b * MS} for kind, a, b in parts]
    reduce = {"kind": "collective", "name": "all_reduce", "group": "shard", "bytes": 2**20}
    return [*spans, none | reduce | {"start_ns": begin + 50 * MS, "end_ns": begin + 90 * MS}]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder: Path = tmp_path_factory.mktemp("run") / "telemetry"
    rows = [span for rank in range(4) for step in range(1, 11) for span in _spans_of(rank, step)]
    spans = pa.Table.from_pylist(rows, schema=SPANS)
    phases, steps = sums(spans)
    for number, (table, of_table) in enumerate({"spans": spans, "phases": phases, "steps": steps}.items()):
        write_part(folder, table, "node-a", of_table, 0, number)
    return Trace.open(folder.parent)


def _described(figure: Figure) -> str:
    plotly.graph_objects.Figure(figure)
    return described(figure)


def test_averages_of_ranks_are_a_heat_map(trace: Trace) -> None:
    assert _described(rank_heatmap(trace.rank_averages())) == (
        "Phases of a step on 4 ranks as ratios to the median: rank 2 (node-a) 1.50× in forward"
    )


def test_the_breakdown_of_a_step_stands_beside_what_was_expected(trace: Trace) -> None:
    expected = {"forward": 0.02, "backward": 0.04, "wait": 0.0, "optimizer": 0.008}
    figure = expected_beside_measured(expected, trace.step_breakdown(1, 10))
    assert "0.1 s measured, 0.068 s expected (+47.1 %); largest differences: wait +0.0275 s" in _described(figure)


def test_spans_are_a_timeline_and_bytes(trace: Trace) -> None:
    assert "2 ranks, steps 3 to 4: 200 ms" in _described(merged_timeline(trace.timeline(3, 4, ranks=[0, 2])))
    groups = [{"group": "shard", "ranks": [0, 1, 2, 3]}]
    sums_of_bytes = trace.sql("select * from spans where kind = 'collective'")
    assert "in all 40 MiB: most, 10 MiB, from rank 0 to rank 1" in _described(
        communication_matrix(sums_of_bytes, groups)
    )
