"""A published trace of a real job with one slow worker (shared/data/traces/straggler-analysis), seen in our figures."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from phalanx.figures.measured_pipeline import measured_timeline, replayed
from phalanx.figures.merged_timeline import merged_timeline
from phalanx.figures.pipeline import pipeline_beside_plan
from phalanx.figures.rank_heatmap import rank_heatmap
from phalanx.figures.series import unpacked
from phalanx.figures.style import described
from phalanx.parallel.pipeline.schedules import make_table
from phalanx.telemetry.span_store import SPANS

TRACE = Path(__file__).parents[3] / "shared/data/traces/straggler-analysis/trace-AR.parquet"
pytestmark = pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE} is not there")


@pytest.fixture(scope="module")
def first_step() -> pa.Table:
    """The first step as spans; the clocks of its hosts are one."""
    return (
        duckdb.sql(f"""
            select 'host' as host, 0 as attempt, rank, step, split_part(optype, '-', 1) as kind,
                '' as name, '' as "group",
                mc as chunk, mb_id as micro_batch, -1 as peer, 0 as bytes,
                (start_ts::double * 1e9)::bigint as start_ns, ((start_ts::double + duration) * 1e9)::bigint as end_ns
            from '{TRACE}' where step = (select min(step) from '{TRACE}') and optype like '%compute'""")
        .to_arrow_table()
        .cast(SPANS)
    )


def test_the_heat_map_names_the_slow_worker() -> None:
    averages = duckdb.sql(f"""
        with steps as (
            select rank, step, any_value(stage) as stage,
                sum(duration) filter (optype = 'forward-compute') as forward_s,
                sum(duration) filter (optype = 'backward-compute') as backward_s from '{TRACE}' group by rank, step)
        select rank, '' as host, any_value(stage) as stage, avg(forward_s) as forward_s, avg(backward_s) as backward_s
        from steps group by rank order by rank""").to_arrow_table()
    figure = rank_heatmap(averages, alike=averages["stage"].to_pylist())
    assert figure["layout"]["title"]["text"] == "16 ranks: rank 0 2.51× in forward, 2.26× in backward"
    ratios = unpacked(figure["data"][0]["z"])[:, 0]
    assert ratios[0] == pytest.approx(0.546 / 0.218, rel=0.01) and np.abs(ratios[1:] - 1).max() < 0.03


def test_its_pipeline_ran_in_the_order_of_1f1b_and_waited_for_the_slow_stage(first_step: pa.Table) -> None:
    ranks = duckdb.sql(f"select distinct rank, stage from '{TRACE}' where dp_rank = 0 order by stage").fetchall()
    micro_batches = len(set(first_step["micro_batch"].to_pylist()))
    table = make_table("1f1b", 4, 1, micro_batches)
    measured = measured_timeline(first_step, table, [rank for rank, _ in ranks])
    assert [[timed.action for timed in row] for row in measured.ranks] == [list(row) for row in table.actions]
    planned = replayed(measured)
    assert planned.length == pytest.approx(measured.length, rel=0.05)
    assert f"{100 * measured.bubble_fraction:.1f} % bubble" in described(pipeline_beside_plan(measured, planned))
    busy_s = [sum(end - begin for _, begin, end in row) for row in measured.ranks]
    assert busy_s[0] > 2 * max(busy_s[1:])


def test_its_timeline_has_every_span(first_step: pa.Table) -> None:
    figure = merged_timeline(first_step)
    bars = {trace["name"]: len(unpacked(trace["x"])) for trace in figure["data"]}
    kinds = first_step["kind"].to_pylist()
    assert bars == {kind: kinds.count(kind) for kind in ("forward", "backward")}
    assert len(figure["layout"]["yaxis"]["ticktext"]) == 16
