"""Figures of months: what is in the table is in the figure, in Plotly's schema."""

from __future__ import annotations

import pytest

from phalanx.figures.pages.page_blocks import html_of
from phalanx.figures.simulate import choice_lines, run_histogram, straggler_lines, time_shares
from phalanx.figures.style import Figure
from phalanx.simulate.failure_model import FailureScenario, Pool, Work, load_failures
from phalanx.simulate.failure_report import make_report, months_figures, months_sections
from phalanx.simulate.failure_simulation import simulate

plotly = pytest.importorskip("plotly.graph_objects")


def checked(figure: Figure) -> Figure:
    plotly.Figure(figure)  # refuses what its schema does not know
    return figure


def test_shares_are_bars_without_training_and_without_what_never_happens() -> None:
    rows = [
        {"part": "training", "share": 0.9, "least": 0.8, "most": 1.0},
        {"part": "saving", "share": 0.1, "least": 0.05, "most": 0.2},
        {"part": "queue", "share": 0.0, "least": 0.0, "most": 0.0},
    ]
    [trace] = checked(time_shares(rows))["data"]
    assert trace["y"] == ["saving"] and trace["x"] == [10.0]
    assert trace["error_x"]["array"] == [pytest.approx(10)] and trace["error_x"]["arrayminus"] == [pytest.approx(5)]


def test_runs_have_a_line_at_the_formula() -> None:
    figure = checked(run_histogram([1.0, 2.0, 2.5], "Runs", "days", 1.5))
    assert figure["data"][0]["x"] == [1.0, 2.0, 2.5] and figure["layout"]["shapes"][0]["x0"] == 1.5
    assert "shapes" not in checked(run_histogram([1.0], "Runs", "days"))["layout"]


def test_choices_are_lines_with_points_where_they_were_played() -> None:
    rows = [{"value": 1.0, "ettr": 0.5, "goodput": 0.4}, {"value": 2.0, "ettr": 0.6, "goodput": 0.45}]
    played = [{"value": 2.0, "ettr": 0.61, "low": 0.6, "high": 0.63}]
    figure = checked(choice_lines(rows, played, "Spares", "hosts", is_log=True))
    assert [trace["y"] for trace in figure["data"]] == [[50.0, 60.0], [40.0, 45.0], [61.0]]
    assert figure["layout"]["xaxis"]["type"] == "log"
    assert len(checked(choice_lines(rows, [], "Spares", "hosts"))["data"]) == 2


def test_stragglers_by_hosts() -> None:
    row = {"hosts": 8, "alike_ratio": 0.01, "unfound_ratio": 0.02, "found_ratio": 0.015, "restarts_ratio": 0.001}
    figure = checked(straggler_lines([row]))
    assert [trace["y"] for trace in figure["data"]] == [[1.0], [2.0], [1.5], [0.1]]


def test_a_page_of_months_has_a_place_for_every_figure() -> None:
    work = Work(16, step_s=10, steps=2000, days=5, price_per_device_hour=1)
    outcome = simulate(FailureScenario(work, load_failures("minder").scaled(0.1), pool=Pool(spares=2)), 6)
    report = make_report(outcome, "Minder", compare_runs=3)
    text = html_of(months_sections(report))
    for name, figure in months_figures(report).items():
        assert f'id="{name}"' in text
        checked(figure)
