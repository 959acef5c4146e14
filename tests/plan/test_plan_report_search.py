"""What a search found as text, JSON and a page: the best is first, what it shows is what the search says."""

from __future__ import annotations

import io
import json
import re
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import plotly.graph_objects
import pytest
from rich.console import Console
from search_costs import GPT3, FakeCosts

from phalanx.figures.pages.page_blocks import write_page
from phalanx.figures.style import thinned
from phalanx.plan.report.report_model import search_json
from phalanx.plan.report.report_page import search_figures, search_sections
from phalanx.plan.report.report_text import (
    axes_of,
    numbers_of,
    others_text,
    search_text,
    short_columns,
    short_text,
    split_columns,
)
from phalanx.plan.search.constraints import SearchTarget, parse
from phalanx.plan.search.search import ChoiceOutcome, SearchResult, search
from phalanx.plan.types import Job, Prediction, Strategy


@cache
def _result() -> SearchResult:
    job = Job(GPT3, 2048, 64)
    return search(job, SearchTarget(32, 8, 2.0), FakeCosts(job).costs, parse(["context=1", "chunks<=4"]), 6)


def _text(width: int) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None)
    console.print(search_text(_result(), "gpt3", width=width), highlight=False)
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_it_fits_the_terminal_and_nothing_is_cut(width: int) -> None:
    lines = _text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_whatever_the_width_every_choice_of_every_layout_is_told(width: int) -> None:
    """Choices are columns, or words where columns have no room."""
    result = _result()
    differing, _ = short_columns([one.strategy for one in result.shapes])
    assert {"schedule", "zero"} <= set(differing)
    table = _text(width).partition("the best of each way")[2].partition("\n\n")[0]
    told = re.split(r"\n(?= *\d+\.\d{3} )", table)[1:]
    assert len(told) == len(result.shapes)
    for one, row in zip(result.shapes, told, strict=True):
        words = set(re.split(r"[\s,]+", row))
        values = {short_text(one.strategy, name) for name in differing} - {"-", "none"}
        assert {axes_of(one.strategy), *(word for value in values for word in value.split())} <= words


def test_what_the_run_takes_stands_in_the_head() -> None:
    file = io.StringIO()
    Console(file=file, width=80, color_system=None).print(search_text(_result(), "gpt3", run="3T tokens: 9 days"))
    assert re.search(r"^best: .*\n3T tokens: 9 days\n\nthe fastest", file.getvalue(), flags=re.MULTILINE)


def test_layouts_come_in_order_and_with_what_they_take() -> None:
    result = _result()
    table = _text(120).partition("the fastest layouts")[2].partition("\n\n")[0]
    rows = re.findall(r"^ *([\d.]+) +[\d.]+ % +[\d.]+ +(\S+) .*?([a-z][a-z -]+ [\d.]+ %)", table, flags=re.MULTILINE)
    assert [layout for _, layout, _ in rows] == [axes_of(best.strategy) for best in result.best]
    assert [float(seconds) for seconds, _, _ in rows] == [round(best.step_s, 3) for best in result.best]


def test_what_is_to_be_pasted_is_the_best() -> None:
    keys = tomllib.loads(_text(80).partition("to paste into the config\n")[2])
    best = _result().best[0].strategy
    assert {name: keys["parallel"].get(name, 1) for name in ("pipeline", "shard", "tensor")} == {
        name: getattr(best, name) for name in ("pipeline", "shard", "tensor")
    }
    assert keys["train"]["micro_batch"] == best.micro_batch


def test_choices_are_told_with_what_other_values_cost() -> None:
    told = _text(120).partition("what hangs on each choice")[2]
    result = _result()
    for choice in result.sensitivities:
        row = re.search(rf"^{choice.choice.replace('_', ' ')} .*$", told, flags=re.MULTILINE)
        assert row is not None
    tensor = next(choice for choice in result.sensitivities if choice.choice == "tensor")
    other = next(outcome for outcome in tensor.outcomes if outcome.value != tensor.value and outcome.best)
    assert other.best is not None
    more = 100 * (other.best.step_s / result.best[0].step_s - 1)
    assert f"{other.value}: {more:+.1f} %" in told


def test_small_memory_has_digits_that_tell_layouts_apart() -> None:
    best = _result().best[0]
    (rank, *_) = best.memory
    none = dict.fromkeys(("gradients", "optimizer", "activations", "workspace", "loss_head"), 0.0)
    none |= dict.fromkeys(("communication", "fragmentation"), 0.0)

    def with_gib(gib: float) -> Prediction:
        return replace(best, memory=(replace(rank, parameters=gib * 2**30, **none),))

    assert [cells[2] for cells in numbers_of([with_gib(0.1234), with_gib(0.0567)])] == ["0.123", "0.057"]
    assert [cells[2] for cells in numbers_of([with_gib(70.78), with_gib(3.84)])] == ["70.8", "3.8"]
    assert axes_of(Strategy()) == "one device"


def test_values_with_which_nothing_fits_are_told_together() -> None:
    best = _result().best[0]
    slower, nothing = replace(best, step_s=1.031 * best.step_s), float("inf")
    outcomes = [
        ChoiceOutcome(8, None, nothing, True, 1e12, None),
        ChoiceOutcome(2, slower, slower.step_s, True, 1e10, None),
        ChoiceOutcome(16, None, nothing, True, 1e12, None),
        ChoiceOutcome(4, None, 1.2 * best.step_s, False, 1e10, None),
    ]
    told = "2: +3.1 %, 4: at least +20.0 %, if it fits, do not fit: 8, 16"
    assert others_text("tensor", outcomes, best.step_s) == told
    assert others_text("tensor", outcomes[:1], best.step_s) == "does not fit: 8"


def test_json_can_be_read_back() -> None:
    plain = json.loads(json.dumps(search_json(_result())))
    assert [row["step_s"] for row in plain["best"]] == sorted(row["step_s"] for row in plain["best"])
    assert plain["best"][0]["strategy"]["tensor"] == _result().best[0].strategy.tensor
    assert tomllib.loads(plain["best"][0]["toml"])["train"]["global_batch"] == 64
    assert plain["fitting"] == _result().fitting
    assert all(rule["removed"] <= rule["before"] for rule in plain["removed"])


def test_the_page_has_every_layout_once(tmp_path: Path) -> None:
    result, figures = _result(), search_figures(_result())
    for figure in figures.values():
        plotly.graph_objects.Figure(figure)
    write_page(tmp_path / "search.html", "search", search_sections(result), figures)
    points = [(x, y) for trace in figures["pareto"]["data"] for x, y in zip(trace["x"], trace["y"], strict=True)]
    every = {repr(one.strategy) for one in (*result.best, *result.shapes, *result.pareto)}
    assert len(points) == len(every)
    front = next(trace for trace in figures["pareto"]["data"] if "line" in trace)
    assert front["y"] == sorted(front["y"], reverse=True)  # more memory, less time
    assert {'id="pareto"', 'id="choices"'} <= set(re.findall(r'id="\w+"', (tmp_path / "search.html").read_text()))


def test_columns_are_what_differs() -> None:
    one = Strategy(pipeline=2, tensor=4, micro_batch=1)
    other = Strategy(pipeline=2, tensor=4, micro_batch=2)
    assert split_columns([one, other]) == (
        ["micro_batch"],
        ["schedule", "chunks", "recompute", "tensor_overlap", "sequence_parallel"],
    )
    assert split_columns([Strategy()])[1] == ["micro_batch", "recompute"]


def test_many_are_thinned_with_their_ends() -> None:
    many = list(_result().best) * 10
    assert len(thinned(many, 7)) == 7
    assert thinned(many, 7)[0] is many[0] and thinned(many, 7)[-1] is many[-1]
    assert thinned(many[:3], 7) == many[:3]
