"""Figures of a prediction: what is in the table is in the figure, in Plotly's schema."""

from __future__ import annotations

import subprocess
import sys

import plotly.graph_objects
import pytest

from phalanx.figures.pipeline import pipeline_timeline
from phalanx.figures.plan import choice_costs, memory_bars, step_breakdown
from phalanx.figures.style import Figure
from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import make_table
from phalanx.parallel.pipeline.timeline import simulate

PARTS = [
    {"path": "compute/mlp", "seconds": 2.0, "mark": "derived", "hidden": False},
    {"path": "data/reduce", "seconds": 0.5, "mark": "measured", "hidden": False},
    {"path": "compute/attention", "seconds": 1.0, "mark": "derived", "hidden": False},
    {"path": "data/gather", "seconds": 0.7, "mark": "assumed", "hidden": True},
]


def _checked(figure: Figure) -> Figure:
    plotly.graph_objects.Figure(figure)  # refuses what its schema does not know
    return figure


def test_a_step_is_a_bar_for_each_group_with_the_largest_first() -> None:
    figure = _checked(step_breakdown(PARTS))
    assert figure["layout"]["yaxis"]["categoryarray"] == ["data", "compute"]  # from below
    assert [(t["name"], t["x"], t["y"]) for t in figure["data"]] == [
        ("compute/mlp", [2.0], ["compute"]),
        ("compute/attention", [1.0], ["compute"]),
        ("data/reduce", [0.5], ["data"]),
        ("data/gather", [0.7], ["data"]),
    ]
    assert ["pattern" in trace["marker"] for trace in figure["data"]] == [False, False, False, True]
    assert "57.1 % of the step" in figure["data"][0]["hovertemplate"]


def test_memory_stacks_kinds_under_the_limit() -> None:
    rows = [
        {"pipeline_rank": rank, "kind": kind, "bytes": size * 2**30}
        for rank in range(100)
        for kind, size in (("parameters", 10.0), ("activations", 20.0 - rank / 10))
    ]
    figure = _checked(memory_bars(rows, 64 * 2**30))
    assert [trace["name"] for trace in figure["data"]] == ["parameters", "activations"]
    shown = [int(rank) for rank in figure["data"][0]["x"]]
    assert (shown[0], shown[-1]) == (0, 99) and len(shown) <= 64 and shown == sorted(set(shown))
    assert figure["data"][1]["y"][-1] == pytest.approx(20.0 - 9.9)
    assert figure["layout"]["shapes"][0]["y0"] == 64.0
    assert f"{len(shown)} of 100" in figure["layout"]["title"]["text"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"])
def test_a_timeline_has_every_unit_of_every_rank(schedule: Schedule) -> None:
    table = make_table(schedule, 4, 1 if schedule == "1f1b" else 2, 8)
    timeline = simulate(table)
    title = f"{100 * timeline.bubble_fraction:.1f} % of the ranks' time is waiting"
    figure = _checked(pipeline_timeline(timeline, title, "units of a forward pass of one stage"))
    cells = figure["data"][0]["z"]
    assert (len(cells), len(cells[0])) == (4, timeline.length)
    waiting = sum(row.count(0) for row in cells) / (4 * timeline.length)
    assert waiting == pytest.approx(timeline.bubble_fraction)
    assert figure["layout"]["title"]["text"] == title


def _heavy_modules(statement: str) -> str:
    code = f"""
import importlib, pkgutil, sys

def load(package):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)

{statement}
print([name for name in ("torch", "numpy", "pandas", "scipy", "pyarrow", "plotly") if name in sys.modules])
"""
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()


def test_planner_and_figures_import_no_torch_and_those_of_small_tables_no_numpy() -> None:
    small = "import phalanx.figures.plan, phalanx.figures.simulate, phalanx.figures.pipeline"
    assert _heavy_modules(small) == "[]"
    assert _heavy_modules("import phalanx.plan; load(phalanx.plan)") == "['numpy']"
    assert _heavy_modules("import phalanx.figures; load(phalanx.figures)") == "['numpy', 'pyarrow']"


def test_values_that_lie_on_each_other_have_one_label() -> None:
    rows = [
        {"choice": choice, "value": value, "more": more}
        for choice, value, more in (
            ("tensor", 8, 0.0),
            ("tensor", 4, 0.001),
            ("tensor", 2, 0.2),
            ("zero", 1, 0.0),
            ("zero", 3, 0.4),
        )
    ]
    (trace,) = _checked(choice_costs(rows))["data"]
    assert trace["text"] == ["8", "", "2", "1", "3"]
    assert trace["customdata"] == ["8", "4", "2", "1", "3"]
    assert trace["x"] == pytest.approx([0, 0.1, 20, 0, 40])
