"""Curves of runs: the points are the columns', whatever x is; marks stand on them; broken numbers are seen."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import plotly.graph_objects
import pyarrow as pa
import pytest

from phalanx.figures.curves import columns_of, curves, marks_of
from phalanx.figures.series import smoothed, unpacked
from phalanx.figures.style import Figure, described

LINES = [
    {"kind": "start", "step": 0, "startup/data_s": 0.1},
    {"kind": "step", "step": 1, "loss": 5.0, "tokens": 256, "step_s": 2.0, "skipped": 0},
    {
        "kind": "step",
        "step": 2,
        "loss": None,
        "tokens": 512,
        "step_s": 3.0,
        "skipped": 1,
        "not_finite": {"loss": "nan"},
    },
    {"kind": "evaluation", "step": 2, "validation_loss": 4.5},
    {"kind": "checkpoint", "step": 2, "checkpoint/name": "step-00000002"},
    {"kind": "start", "step": 2, "startup/data_s": 0.1},
    {"kind": "step", "step": 3, "loss": 4.0, "tokens": 768, "step_s": 1.0, "skipped": 0},
]


def _checked(figure: Figure) -> Figure:
    plotly.graph_objects.Figure(figure)
    json.dumps(figure, allow_nan=False)
    assert described(figure)
    return figure


def _lines(figure: Figure) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found = [trace for trace in figure["data"] if trace["mode"] == "lines" and trace.get("opacity") is None]
    return {trace["name"]: (unpacked(trace["x"]), unpacked(trace["y"])) for trace in found}


def _trace(figure: Figure, name: str) -> Any:
    return next(trace for trace in figure["data"] if trace["name"] == name)


def test_lines_of_metrics_become_columns_and_marks() -> None:
    columns = columns_of(LINES)
    assert columns["step"].to_pylist() == [1, 2, 3]
    assert columns["validation_loss"].to_pylist() == [None, 4.5, None]
    loss = columns["loss"].to_pylist()
    assert loss[0] == 5.0 and np.isnan(loss[1]) and loss[2] == 4.0
    assert [(mark["kind"], mark["step"]) for mark in marks_of("a", LINES)] == [
        ("skipped step", 2),
        ("checkpoint", 2),
        ("resume", 2),
    ]


@pytest.mark.parametrize(
    ("x", "expected", "title"),
    [
        ("step", [1, 2, 3], "step"),
        ("tokens", [256, 512, 768], "tokens"),
        ("time_s", [2, 5, 6], "seconds of training"),
    ],
)
def test_x_is_steps_tokens_or_time(x: Any, expected: list[float], title: str) -> None:
    figure = _checked(curves({"a": columns_of(LINES)}, "loss", unit="nats", x=x))
    xs, ys = _lines(figure)["a"]
    assert xs.tolist() == expected
    np.testing.assert_array_equal(ys, [5, np.nan, 4])
    assert figure["layout"]["xaxis"]["title"]["text"] == title
    assert figure["layout"]["yaxis"]["title"]["text"] == "loss, nats"


def test_x_in_flops_and_runs_that_lack_it_are_said() -> None:
    runs = {"a": {"step": [1, 2], "flops": [1e18, 2e18], "loss": [3.0, 2.0]}, "b": {"step": [1], "loss": [1.0]}}
    figure = _checked(curves(runs, "loss", x="flops"))
    assert _lines(figure)["a"][0].tolist() == [1e18, 2e18]
    assert "1 more have none" in figure["layout"]["title"]["text"]


def test_a_column_of_evaluations_joins_steps_that_have_it() -> None:
    rows = columns_of([*LINES, {"kind": "evaluation", "step": 3, "validation_loss": 4.25}])
    xs, ys = _lines(_checked(curves({"a": rows}, "validation_loss", x="tokens")))["a"]
    assert (xs.tolist(), ys.tolist()) == ([512, 768], [4.5, 4.25])


def test_marks_stand_on_the_curve_and_broken_numbers_below() -> None:
    incident = {"run": "a", "kind": "incident", "step": 3, "text": "rank 5 died"}
    stranger = {"run": "b", "kind": "incident", "step": 3, "text": ""}
    marks = [*marks_of("a", LINES), incident, stranger]
    figure = _checked(curves({"a": columns_of(LINES)}, "loss", x="tokens", marks=marks))
    assert (_trace(figure, "incident")["x"], _trace(figure, "incident")["y"]) == ([768.0], [4.0])
    assert "rank 5 died" in _trace(figure, "incident")["text"][0]
    # Step 2 has no number: its marks stand where the curve was last.
    for kind in ("checkpoint", "resume", "skipped step", "not finite"):
        assert (_trace(figure, kind)["x"], _trace(figure, kind)["y"]) == ([512.0], [5.0]), kind


def test_smoothing_is_stated_and_what_is_smoothed_stays_visible() -> None:
    loss = np.random.default_rng(0).normal(3, 0.1, 1000)
    figure = _checked(curves({"a": {"step": np.arange(1000), "loss": loss}}, "loss", span=50))
    np.testing.assert_allclose(_lines(figure)["a"][1], smoothed(loss, 50), rtol=1e-6)
    np.testing.assert_allclose(unpacked(_trace(figure, "a, not smoothed")["y"]), loss, rtol=1e-6)
    assert "smoothed over 50 steps" in figure["layout"]["title"]["text"]
    assert "smoothed over 50 steps" in described(figure)


def test_runs_differ_by_more_than_colour_and_many_have_no_legend() -> None:
    runs = {f"run {i}": {"step": [1, 2], "loss": [3.0, 2.0 + i]} for i in range(30)}
    few = _checked(curves(dict(list(runs.items())[:24]), "loss"))
    looks = [(t["marker"]["color"], t["marker"]["symbol"]) for t in few["data"] if t["mode"] == "markers"]
    assert len(looks) == 24 == len(set(looks))
    many = _checked(curves(runs, "loss"))
    assert many["layout"]["showlegend"] is False and len(many["data"]) == 30
    assert "run 0 ends lowest at 2, run 29 highest at 31" in described(many)


def test_no_runs_no_column_one_row_and_only_broken_numbers() -> None:
    assert "no runs" in described(_checked(curves({}, "loss")))
    assert "no run of 1 has loss" in described(_checked(curves({"a": {"step": [1], "x": [1.0]}}, "loss")))
    assert "no run of 1" in described(_checked(curves({"a": {"step": [1], "loss": [None]}}, "loss")))
    empty = pa.table({"step": pa.array([], pa.int64()), "loss": pa.array([], pa.float64())})
    assert "no run of 1" in described(_checked(curves({"a": empty}, "loss")))
    one = _checked(curves({"a": {"step": [7], "loss": [2.5]}}, "loss", span=10, is_log=True))
    assert _lines(one)["a"][1].tolist() == [2.5] and one["layout"]["yaxis"]["type"] == "log"
    broken = _checked(curves({"a": {"step": [1, 2], "loss": [float("nan"), float("inf")]}}, "loss"))
    assert len(_trace(broken, "not finite")["x"]) == 2


def test_two_hundred_runs_of_a_hundred_thousand_steps_are_quick() -> None:
    steps = np.arange(1, 100_001)
    rng = np.random.default_rng(0)
    runs = {f"run {i}": {"step": steps, "loss": rng.normal(3, 0.1, 100_000)} for i in range(200)}
    runs["run 17"]["loss"][54_321] = 99.0
    begin = time.process_time()
    figure = curves(runs, "loss", span=1)
    assert time.process_time() - begin < 2  # 0.3 s on a machine that does nothing else
    assert unpacked(figure["data"][17]["y"]).max() == 99.0
    assert all(len(unpacked(trace["y"])) <= 2002 for trace in figure["data"])
    assert {trace["type"] for trace in figure["data"]} == {"scattergl"}
