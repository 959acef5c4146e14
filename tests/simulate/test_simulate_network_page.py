"""The page about a network: figures that Plotly takes, and texts that say what the table says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from phalanx.figures.pages.page_blocks import html_of
from phalanx.figures.simulate import lost_bars, queue_lines
from phalanx.plan.hardware.cluster import load_cluster
from phalanx.simulate.network_report import fabric_line, network_figures, network_sections
from phalanx.simulate.network_scenario import changed, make_scenario
from phalanx.simulate.network_settings import network_of
from phalanx.simulate.network_simulation import CAUSES, NetworkReport, what_if
from phalanx.simulate.traffic import Phase, Traffic


@pytest.fixture(scope="module")
def report() -> NetworkReport:
    network = network_of(load_cluster("megascale", 1024))
    base = make_scenario("<base>", network, {"placement": "scattered", "congestion": "swift"})
    gone = changed(base, "gone", {"flap_s": 1000.0})
    traffic = Traffic((Phase("data", "ring", 128, 8, 1e8),), 1.0, "by hand")
    return what_if(network, traffic, [base, gone], draws=1, curves=True)


def test_figures_are_plotly_s(report: NetworkReport) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    figures = network_figures(report)
    assert set(figures) == {"lost", "down", "queues"}
    for figure in figures.values():
        graph_objects.Figure(figure)  # raises where its schema knows no such key or value
        json.dumps(figure, allow_nan=False)


def test_bars_add_up_to_what_is_lost(report: NetworkReport) -> None:
    figures = network_figures(report)
    lost, down = (sum(trace["x"][0] for trace in figures[name]["data"]) for name in ("lost", "down"))
    assert lost == pytest.approx(report.outcomes[0].step_s - report.ideal_step_s)
    assert down == pytest.approx(lost)  # the job ends: there is no time of a flap to draw
    assert figures["lost"]["layout"]["annotations"] == []
    assert [note["y"] for note in figures["down"]["layout"]["annotations"]] == ["gone"]


def test_causes_without_any_time_are_left_out() -> None:
    rows = [{"scenario": "a", "why": "", **dict.fromkeys(CAUSES, 0.0), "hashing": 0.5}]
    (trace,) = lost_bars(rows, 1.0)["data"]
    assert trace["name"] == "collisions of hashes"


def test_queues_are_drawn_in_microseconds_over_milliseconds() -> None:
    figure = queue_lines([{"control": "swift", "time_s": (0.001, 0.002), "queue_s": (1e-6, 0.0)}], 9)
    (trace,) = figure["data"]
    assert (trace["x"], trace["y"]) == ([1.0, 2.0], pytest.approx([1.0, 0.1]))  # nothing is at the foot of a log axis
    assert "9 connections" in figure["layout"]["title"]["text"]


def test_the_page_says_what_the_table_says_and_hides_nothing_in_markup(report: NetworkReport) -> None:
    page = html_of(network_sections(report))
    assert "&lt;base&gt;" in page
    assert "<base>" not in page
    assert "never" in page
    assert f"{report.outcomes[0].step_s:.3f}" in page
    for figure in network_figures(report):
        assert f'id="{figure}"' in page


def test_a_fabric_in_a_line() -> None:
    fabric = network_of(load_cluster("megascale", 12288)).fabric
    assert fabric_line(fabric) == (
        "24 ToR groups of 64 hosts in 6 pods, 3 layers of 64-port switches, rail-optimised, 1:1 at ToRs, 1:1 above, "
        "uplinks 2 x a NIC"
    )


def test_figures_import_nothing_heavy() -> None:
    code = "import sys, phalanx.figures.simulate; print({'numpy', 'torch', 'plotly'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "set()"
