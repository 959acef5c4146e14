"""The lattice of ranks: place, groups and neighbours of the one that was picked."""

from __future__ import annotations

import json
import time
from typing import Any

import plotly.graph_objects
import pytest

from phalanx.core.layout import Layout
from phalanx.figures.lattice import rank_flows, rank_lattice
from phalanx.figures.style import Figure, described

LAYOUT = Layout(pipeline=4, replicate=2, shard=2, context=2, tensor=2)


def _checked(figure: Figure) -> Figure:
    plotly.graph_objects.Figure(figure)
    json.dumps(figure, allow_nan=False)
    return figure


def _ranks(figure: Figure, name: str) -> list[int]:
    return next((trace["customdata"] for trace in figure["data"] if trace["name"].startswith(name)), [])


def _place(figure: Figure, rank: int) -> tuple[float, float]:
    found: Any = next(trace for trace in figure["data"] if rank in trace["customdata"])
    at = found["customdata"].index(rank)
    return found["x"][at], found["y"][at]


def test_groups_and_neighbours_are_those_of_the_layout() -> None:
    flows = {flow.axis: flow for flow in rank_flows(LAYOUT, 21)}  # stage 1, replicate 0, shard 1, context 0, tensor 1
    assert flows["pipeline"].ranks == (5, 21, 37, 53)
    assert (flows["pipeline"].receives_from, flows["pipeline"].sends_to) == (5, 37)
    assert flows["replicate"].ranks == (21, 29) and flows["shard"].ranks == (17, 21)
    assert flows["context"].ranks == (21, 23) and flows["tensor"].ranks == (20, 21)
    assert (flows["context"].receives_from, flows["context"].sends_to) == (23, 23)
    assert rank_flows(Layout(), 0) == []


@pytest.mark.parametrize(("rank", "chunks", "before", "after"), [(5, 1, None, 21), (53, 1, 37, None), (53, 2, 37, 5)])
def test_the_ends_of_a_pipeline_have_one_neighbour_unless_chunks_go_around(
    rank: int, chunks: int, before: int | None, after: int | None
) -> None:
    flow = rank_flows(LAYOUT, rank, chunks=chunks)[0]
    assert (flow.receives_from, flow.sends_to) == (before, after)


def test_every_rank_of_a_small_layout_is_drawn_once_besides_the_silent() -> None:
    events = {rank: "all_gather of shard, 12 s ago" for rank in range(64) if rank not in (3, 40)}
    figure = _checked(rank_lattice(LAYOUT, 21, last_events=events))
    drawn = [rank for trace in figure["data"] if trace["name"] != "no last event" for rank in trace["customdata"]]
    assert sorted(drawn) == list(range(64))
    assert _ranks(figure, "rank 21") == [21]
    assert _ranks(figure, "pipeline group") == [5, 37, 53] and _ranks(figure, "tensor group") == [20]
    assert _ranks(figure, "no last event") == [3, 40]
    # A row for each of the 4 data-parallel indices, 4 columns and a gap of 2 for each stage.
    assert _place(figure, 0) == (0, 0) and _place(figure, 21) == (7, 1) and _place(figure, 63) == (21, 3)
    assert "last: all_gather of shard, 12 s ago" in figure["layout"]["title"]["text"]
    assert "pipeline group of 4 ranks from 5 to 53" in described(figure)


def test_arrows_go_from_stage_to_stage_and_gradients_back() -> None:
    figure = rank_lattice(LAYOUT, 21)
    arrows = [(a["ax"], a["x"], a["arrowwidth"]) for a in figure["layout"]["annotations"] if a["showarrow"]]
    assert arrows[:4] == [(1, 7, 2), (7, 1, 1), (7, 13, 2), (13, 7, 1)]
    names = [a["text"] for a in figure["layout"]["annotations"] if not a["showarrow"]]
    assert names == ["stage 0", "stage 1", "stage 2", "stage 3"]


def test_one_rank_alone_and_a_rank_that_is_not_there() -> None:
    figure = _checked(rank_lattice(Layout(), 0))
    assert _ranks(figure, "rank 0") == [0] and "alone" in figure["layout"]["title"]["text"]
    with pytest.raises(ValueError, match="ranks 0 to 63"):
        rank_lattice(LAYOUT, 64)


def test_of_a_large_layout_the_planes_through_the_rank_are_drawn() -> None:
    layout = Layout(pipeline=8, replicate=12, shard=16, tensor=8)
    begin = time.process_time()
    figure = _checked(rank_lattice(layout, 5000))
    assert time.process_time() - begin < 1
    drawn = {rank for trace in figure["data"] for rank in trace["customdata"]}
    here = layout.coordinates(5000)
    for rank in drawn:
        at = layout.coordinates(rank)
        same_row = (at.replicate, at.shard) == (here.replicate, here.shard)
        assert at.pipeline == here.pipeline or same_row or at.tensor == here.tensor
    assert len(drawn) < 1000 and {layout.coordinates(rank).pipeline for rank in drawn} == set(range(8))
    assert set(layout.members(5000, ["pipeline"])) | set(layout.members(5000, ["tensor"])) <= drawn
    assert f"({len(drawn)} of 12,288 ranks are shown)" in figure["layout"]["title"]["text"]
