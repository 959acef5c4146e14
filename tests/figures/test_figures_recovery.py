"""What failures cost: attempts and incidents in time, and shares of all time."""

from __future__ import annotations

import json
from typing import Any

import plotly.graph_objects
import pytest

from phalanx.figures.recovery_history import effective_time, recovery_history
from phalanx.figures.style import Figure, described

START_S = 1_700_000_000.0
ATTEMPTS = [
    {"attempt": 0, "start_s": START_S, "end_s": START_S + 3600, "first_step": 0, "last_step": 100},
    {"attempt": 1, "start_s": START_S + 3720, "end_s": START_S + 21_600, "first_step": 90, "last_step": 500},
]
INCIDENT = {"at_s": START_S + 3600, "what": "rank 5 was killed", "detect_s": 20.0, "restart_s": 100.0, "again_s": 360.0}


def _checked(figure: Figure) -> Figure:
    plotly.graph_objects.Figure(figure)
    json.dumps(figure, allow_nan=False)
    return figure


def _trace(figure: Figure, name: str) -> Any:
    return next(trace for trace in figure["data"] if trace["name"] == name)


def test_attempts_climb_and_fall_back_and_incidents_have_their_costs() -> None:
    figure = _checked(recovery_history(ATTEMPTS, [{**INCIDENT, "lost_steps": 10}]))
    line = _trace(figure, "progress of an attempt")
    assert line["x"] == pytest.approx([0, 1, None, 3720 / 3600, 6, None])
    assert line["y"] == [0, 100, None, 90, 500, None]
    assert (_trace(figure, "incident")["x"], _trace(figure, "incident")["y"]) == ([1.0], [100])
    costs = {t["name"]: (t["x"], t["y"]) for t in figure["data"] if t["type"] == "bar"}
    assert costs == {
        "until it was noticed": ([20.0], ["1. rank 5 was killed"]),
        "until training went on": ([100.0], ["1. rank 5 was killed"]),
        "steps made again": ([360.0], ["1. rank 5 was killed"]),
    }
    assert figure["layout"]["xaxis"]["title"]["text"] == "hours since the first start"
    assert described(figure) == (
        "2 attempts, 1 incident, median 20 s until it was noticed, median 100 s until training went on, 10 steps lost"
    )


def test_what_is_not_known_is_left_out() -> None:
    unknown = {**INCIDENT, "detect_s": None, "restart_s": float("nan"), "lost_steps": 0}
    figure = _checked(recovery_history(ATTEMPTS, [unknown, {**INCIDENT, "lost_steps": 3}]))
    assert _trace(figure, "until it was noticed")["x"] == [0.0, 20.0]
    assert "median 20 s until it was noticed, median 100 s" in described(figure)


def test_no_attempt_no_incident_and_very_many() -> None:
    assert "no attempt" in described(_checked(recovery_history([], [])))
    calm = _checked(recovery_history(ATTEMPTS[:1], []))
    assert described(calm) == "1 attempt, 0 incidents" and len(calm["data"]) == 1
    assert calm["layout"]["xaxis"]["title"]["text"] == "minutes since the first start"
    many = _checked(recovery_history(ATTEMPTS, [{**INCIDENT, "lost_steps": 1}] * 150))
    assert len(_trace(many, "until it was noticed")["x"]) == 40 and len(_trace(many, "incident")["x"]) == 150
    assert _trace(many, "until it was noticed")["y"][0].startswith("111. ")
    assert "the newest 40 are drawn" in many["layout"]["title"]["text"] and "150 steps lost" in described(many)


def _rows(run: str, **seconds: float) -> list[dict[str, Any]]:
    return [{"run": run, "part": part.replace("_", " "), "seconds": value} for part, value in seconds.items()]


def test_effective_time_is_the_share_of_training_and_losses_come_by_their_size() -> None:
    rows = _rows("a", restart=360, training=36_000 - 1080, made_again=720.0, detection=0.0)
    figure = _checked(effective_time(rows))
    assert [(trace["name"], trace["x"]) for trace in figure["data"]] == [
        ("training", [pytest.approx(9.7)]),
        ("made again", [pytest.approx(0.2)]),
        ("restart", [pytest.approx(0.1)]),
    ]
    assert figure["data"][0]["customdata"] == [pytest.approx(97.0)]
    assert described(figure) == "Effective training time: 97.0 % (lost: made again 2.0 %, restart 1.0 %)"
    hatches = [trace["marker"]["pattern"]["shape"] for trace in figure["data"]]
    assert hatches[0] == "" and len(set(hatches)) == 3


def test_runs_stand_beside_each_other_also_without_training() -> None:
    figure = _checked(effective_time([*_rows("a", training=90.0, saving=10.0), *_rows("b", queue=60.0)]))
    assert figure["layout"]["yaxis"]["categoryarray"] == ["b", "a"]
    assert _trace(figure, "queue")["x"] == [0.0, 1.0] and _trace(figure, "training")["x"] == [1.5, 0.0]
    assert figure["layout"]["title"]["text"] == "Effective training time: a 90.0 %, b 0.0 %"
    assert "b 0.0 % (lost: queue 100.0 %)" in described(figure)


def test_no_time_has_passed() -> None:
    assert "no time has passed" in described(_checked(effective_time([])))
    assert "no time has passed" in described(_checked(effective_time(_rows("a", training=float("nan"), saving=0.0))))
