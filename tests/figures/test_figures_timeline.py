"""The timeline of ranks, and a pipeline as it ran beside its plan."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import plotly.graph_objects
import pyarrow as pa
import pytest

from phalanx.figures.measured_pipeline import measured_timeline, replayed
from phalanx.figures.merged_timeline import merged_timeline
from phalanx.figures.pipeline import pipeline_beside_plan
from phalanx.figures.series import unpacked
from phalanx.figures.style import Figure, described
from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import make_table
from phalanx.parallel.pipeline.timeline import Lengths, simulate
from phalanx.telemetry.span_store import SPANS

ORIGIN_NS = 1_700_000_000_000_000_000


def _checked(figure: Figure) -> Figure:
    plotly.graph_objects.Figure(figure)
    json.dumps(figure, allow_nan=False)
    return figure


def _span(rank: int, kind: str, from_ms: float, to_ms: float, **more: Any) -> dict[str, Any]:
    plain = {"host": f"node-{rank}", "attempt": 0, "step": 5, "name": "", "group": "", "bytes": 0}
    none = dict.fromkeys(("chunk", "micro_batch", "peer"), -1)
    times = {"start_ns": ORIGIN_NS + int(from_ms * 1e6), "end_ns": ORIGIN_NS + int(to_ms * 1e6)}
    return {**plain, **none, **times, "rank": rank, "kind": kind, **more}


def _table(spans: Iterable[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(spans), schema=SPANS)


SMALL = [
    _span(0, "step", 0, 100),
    _span(0, "forward", 10, 30, chunk=0, micro_batch=2),
    _span(0, "collective", 30, 32, name="send", peer=3, micro_batch=2, bytes=1 << 20),
    _span(3, "step", 1, 101),
    _span(3, "collective", 25, 35, name="receive", peer=0, micro_batch=2, bytes=1 << 20),
    _span(3, "forward", 35, 55, chunk=1, micro_batch=2),
    _span(3, "wait", 60, 75, name="all_reduce", group="shard"),
]


def _bars(figure: Figure, kind: str) -> list[tuple[float, float, float]]:
    trace = next(trace for trace in figure["data"] if trace["name"] == kind)
    return list(zip(*(unpacked(trace[key]).round(6).tolist() for key in ("base", "x", "y")), strict=True))


def test_bars_begin_and_end_with_their_spans_in_the_lane_of_their_rank() -> None:
    figure = _checked(merged_timeline(_table(SMALL)))
    assert _bars(figure, "forward") == [(10, 20, pytest.approx(-0.2)), (35, 20, pytest.approx(0.8))]
    assert _bars(figure, "wait") == [(60, 15, pytest.approx(1.22))]
    assert figure["layout"]["yaxis"]["ticktext"] == ["0", "3"]
    forward = figure["data"][0]
    assert forward["text"] == ["F2", "F2"]
    assert forward["hovertext"][1] == "rank 3, step 5: forward, chunk 1, micro-batch 2"
    assert [line["x0"] for line in figure["layout"]["shapes"]] == [0.0]
    assert "2 ranks, step 5: 101 ms; of a rank's time forward 20 %" in described(figure)


def test_a_message_goes_from_its_send_to_the_end_of_its_receive() -> None:
    figure = _checked(merged_timeline(_table(SMALL)))
    line = figure["data"][-1]
    np.testing.assert_allclose(unpacked(line["x"]), [30, 35, np.nan])
    np.testing.assert_allclose(unpacked(line["y"]), [0.22, 1.22, np.nan], rtol=1e-6)
    assert all("message" not in t["name"] for t in merged_timeline(_table(SMALL), with_messages=False)["data"])
    # Forward and backward messages do not take each other's.
    both = [
        _span(0, "collective", 0, 1, name="forward-send", peer=1),
        _span(1, "collective", 1, 2, name="grad_recv", peer=0),
    ]
    both += [
        _span(1, "collective", 5, 6, name="forward-recv", peer=0),
        _span(0, "collective", 8, 9, name="resend", peer=1),
    ]
    line = merged_timeline(_table(both))["data"][-1]
    np.testing.assert_allclose(unpacked(line["x"]), [0, 6, np.nan])
    # What was sent twice is received twice, in order; what has no other side has no line.
    twice = [_span(0, "collective", t, t + 1, name="send", peer=1) for t in (0, 10, 20)]
    twice += [_span(1, "collective", t, t + 1, name="recv", peer=0) for t in (2, 12)]
    line = merged_timeline(_table(twice))["data"][-1]
    np.testing.assert_allclose(unpacked(line["x"]), [0, 3, np.nan, 10, 13, np.nan])


def test_ranks_and_steps_are_chosen_and_clocks_aligned() -> None:
    later = [_span(0, "forward", 200, 210, step=6)]
    figure = _checked(merged_timeline(_table([*SMALL, *later]), ranks=[3], steps=(5, 5)))
    assert figure["layout"]["title"]["text"] == "Timeline of 1 rank, step 5"
    assert _bars(figure, "forward") == [(34, 20, pytest.approx(-0.2))]
    aligned = merged_timeline(_table(SMALL), clock_offsets_ns={"node-3": 1_000_000})
    assert _bars(aligned, "forward")[1][0] == 34


def test_of_too_many_spans_the_longest_stay_and_the_title_says_so() -> None:
    spans = [_span(rank, "forward", 10 * n, 10 * n + 1 + n % 10) for rank in range(4) for n in range(500)]
    figure = _checked(merged_timeline(_table(spans), most_bars=200))
    bars = _bars(figure, "forward")
    assert len(bars) == 200 and {length for _, length, _ in bars} == {10.0}
    assert "the 200 longest of 2,000 spans" in figure["layout"]["title"]["text"]


def test_long_stretches_are_in_seconds() -> None:
    figure = _checked(merged_timeline(_table([_span(0, "forward", 0, 4000), _span(0, "backward", 4000, 12_000)])))
    assert _bars(figure, "backward") == [(4, 8, pytest.approx(-0.2))]
    assert figure["layout"]["xaxis"]["title"]["text"] == "s since the first span"
    assert described(figure) == "Timeline of 1 rank, step 5: 12 s; of a rank's time backward 67 %, forward 33 %"


def test_all_ranks_of_a_large_job_are_quick() -> None:
    count = 12_288 * 20
    columns = {name: pa.array(np.full(count, -1), SPANS.field(name).type) for name in ("chunk", "micro_batch", "peer")}
    columns |= {name: pa.array([text]).take(np.zeros(count, int)) for name, text in (("host", "h"), ("name", ""))}
    columns |= {"kind": pa.array(["forward", "wait"]).take(np.arange(count) % 2), "group": columns["name"]}
    starts = ORIGIN_NS + np.arange(count) // 12_288 * 10**6
    columns |= {"rank": np.arange(count) % 12_288, "start_ns": starts, "end_ns": starts + 10**6}
    columns |= {"step": np.zeros(count, int), "bytes": np.zeros(count, int), "attempt": np.zeros(count, int)}
    spans = pa.table({name: columns[name] for name in SPANS.names}).cast(SPANS)
    begin = time.process_time()
    figure = merged_timeline(spans)
    assert time.process_time() - begin < 2  # 0.4 s on a machine that does nothing else
    assert sum(len(unpacked(trace["x"])) for trace in figure["data"]) == 5000


def test_no_span_one_span_and_many_lanes() -> None:
    assert "no spans" in described(_checked(merged_timeline(_table([]))))
    assert "no spans" in described(_checked(merged_timeline(_table(SMALL), ranks=[9])))
    one = _checked(merged_timeline(_table([_span(7, "data", 3, 3)])))
    assert _bars(one, "data") == [(0, 0, pytest.approx(-0.2))]
    many = _checked(merged_timeline(_table([_span(rank, "data", 0, 1) for rank in range(1000)])))
    assert len(many["layout"]["yaxis"]["ticktext"]) <= 64


def _spans_of(schedule: Schedule, chunks: int, slow_rank: int = -1) -> tuple[pa.Table, Any, Any]:
    """A step of 4 pipeline ranks (10, 12, 14, 16 of the job), passes of 10 and 20 ms, on one rank twice as long."""
    table = make_table(schedule, 4, chunks, 8)
    ms = {"F": 10, "B": 20, "I": 10, "W": 10}
    ran = simulate(
        table, Lengths(lambda one: ms[one.kind] * (1 + (table.placement.rank_of(one.stage) == slow_rank)) / 1000)
    )
    kinds = {"F": ("forward", ""), "B": ("backward", ""), "I": ("backward", "input"), "W": ("backward", "weights")}
    spans = []
    for place, row in enumerate(ran.ranks):
        for action, begin, end in row:
            kind, name = kinds[action.kind]
            chunk = table.placement.stages_of(place).index(action.stage)
            spans.append(
                _span(10 + 2 * place, kind, 1e3 * begin + 7, 1e3 * end + 7, name=name, chunk=chunk)
                | {"micro_batch": action.micro_batch}
            )
    spans.append(_span(11, "forward", 0, 1, chunk=0, micro_batch=0))  # of another pipeline
    spans.append(_span(10, "optimizer", 900, 950))
    return _table(spans), table, ran


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)])
def test_spans_give_back_the_schedule_that_ran(schedule: Schedule, chunks: int) -> None:
    spans, table, ran = _spans_of(schedule, chunks, slow_rank=2)
    measured = measured_timeline(spans, table, [10, 12, 14, 16])
    assert [[timed.action for timed in row] for row in measured.ranks] == [list(row) for row in table.actions]
    assert measured.length == pytest.approx(ran.length, rel=1e-6)
    assert measured.bubble_fraction == pytest.approx(ran.bubble_fraction, rel=1e-5)
    # Even passes, were each as long as the median of its stage: here that is what they were.
    assert replayed(measured).length == pytest.approx(ran.length, rel=1e-6)


def test_a_pipeline_as_it_ran_lies_above_its_plan_on_one_axis() -> None:
    spans, table, _ = _spans_of("1f1b", 1, slow_rank=2)
    measured = measured_timeline(spans, table, [10, 12, 14, 16])
    planned = simulate(table, Lengths(lambda one: 0.01 * (1 + (one.kind == "B"))))
    figure = _checked(pipeline_beside_plan(measured, planned))
    above, below = (trace for trace in figure["data"] if trace["type"] == "heatmap")
    assert below["yaxis"] == "y2" and "yaxis" not in above
    ends = [trace["dx"] * len(trace["z"][0]) for trace in (above, below)]
    assert ends == pytest.approx([1e3 * measured.length, 1e3 * planned.length])
    assert figure["layout"]["xaxis"]["range"] == [0, pytest.approx(1e3 * measured.length)]
    assert figure["layout"]["xaxis"]["title"]["text"] == "ms since the first forward pass"
    letters = [trace for trace in figure["data"] if trace.get("mode") == "text"]
    assert [len(trace["text"]) for trace in letters] == [64, 64] and letters[0]["text"][0] == "F0"
    assert f"{100 * measured.bubble_fraction:.1f} % bubble, as it ran" in described(figure)


def test_a_pipeline_without_spans_or_with_half_of_them() -> None:
    spans, table, ran = _spans_of("1f1b", 1)
    nothing = measured_timeline(spans.slice(0, 0), table, [10, 12, 14, 16])
    assert "no forward or backward spans" in described(_checked(pipeline_beside_plan(nothing, ran)))
    one_rank = measured_timeline(spans, table, [10, 1, 2, 3])
    _checked(pipeline_beside_plan(one_rank, ran))
    forward = spans.filter(pa.compute.equal(spans["kind"].cast(pa.string()), "forward"))
    with pytest.raises(ValueError, match="not measured: backward"):
        replayed(measured_timeline(forward, table, [10, 12, 14, 16]))
