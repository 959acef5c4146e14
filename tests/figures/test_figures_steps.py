"""A step beside what was expected, norms by layer, bytes between ranks."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import plotly.graph_objects
import pyarrow as pa
import pytest

from phalanx.figures.communication import communication_matrix, pair_bytes
from phalanx.figures.norms import layer_norms
from phalanx.figures.series import unpacked
from phalanx.figures.step_parts import expected_beside_measured
from phalanx.figures.style import Figure, described


def _checked(figure: Figure) -> Figure:
    plotly.graph_objects.Figure(figure)
    json.dumps(figure, allow_nan=False)
    return figure


MEASURED = pa.table(
    {"data_s": [0.01], "forward_s": [0.3], "backward_s": [0.5], "wait_s": [0.15], "other_s": [0.04], "step_s": [1.0]}
)
EXPECTED = {"forward": 0.3, "backward": 0.4, "wait": 0.1, "optimizer": 0.02}


def _by_part(figure: Figure, name: str) -> dict[str, float | None]:
    trace = next(trace for trace in figure["data"] if trace["name"] == name)
    return dict(zip(trace["y"], trace["x"], strict=True))


def test_each_part_has_both_bars_and_what_differs_is_said() -> None:
    figure = _checked(expected_beside_measured(EXPECTED, MEASURED))
    assert _by_part(figure, "measured") == {
        "waiting for data": 0.01,
        "forward": 0.3,
        "backward": 0.5,
        "waiting for communication": 0.15,
        "optimizer": None,
        "other": 0.04,
    }
    assert _by_part(figure, "expected")["backward"] == 0.4 and _by_part(figure, "expected")["other"] is None
    assert figure["layout"]["title"]["text"] == "A step: 1 s measured, 0.82 s expected (+22.0 %)"
    measured = next(trace for trace in figure["data"] if trace["name"] == "measured")
    assert measured["text"][2] == "0.5 s (+25 %)" and measured["text"][0] == "0.01 s"
    assert "largest differences: backward +0.1 s, wait +0.05 s, forward +0 s" in described(figure)


def test_parts_that_nobody_thought_of_are_drawn_too() -> None:
    measured = MEASURED.append_column("evaluation_s", [[0.25]])
    figure = _checked(expected_beside_measured({"persist": 0.5}, measured))
    assert _by_part(figure, "measured")["evaluation"] == 0.25 and _by_part(figure, "expected")["persist"] == 0.5


def test_only_one_of_both_or_neither() -> None:
    nothing = MEASURED.slice(0, 0)
    assert "not measured yet" in described(_checked(expected_beside_measured(EXPECTED, nothing)))
    assert "no prediction" in described(_checked(expected_beside_measured({}, MEASURED)))
    assert "neither" in described(_checked(expected_beside_measured({}, nothing)))
    nulls = pa.table({"forward_s": pa.array([None], pa.float64()), "step_s": [float("nan")]})  # DuckDB's, of no rows
    assert "neither" in described(_checked(expected_beside_measured({}, nulls)))


def _norms(rows: list[tuple[int, Any, str, float | None]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [[], [], [], []]
    types = (pa.int64(), None if rows else pa.string(), pa.string(), pa.float64())
    return pa.table(
        {
            name: pa.array(list(values), type_)
            for name, values, type_ in zip(("step", "layer", "quantity", "value"), columns, types, strict=True)
        }
    )


def test_norms_lie_at_their_layer_and_step_by_their_logarithm() -> None:
    rows = [(step, layer, "gradient", 10.0 ** (layer - step)) for step in (0, 1) for layer in (2, 10)]
    figure = _checked(layer_norms(_norms([*rows, (0, 2, "weight", 7.0)]), "gradient"))
    heatmap = figure["data"][0]
    assert heatmap["y"] == ["2", "10"] and unpacked(heatmap["x"]).tolist() == [0, 1]
    np.testing.assert_allclose(unpacked(heatmap["z"]), [[2, 1], [10, 9]], rtol=1e-6)
    np.testing.assert_allclose(unpacked(heatmap["customdata"])[0], [100, 10], rtol=1e-6)
    assert (heatmap["zmin"], heatmap["zmax"]) == (1, 10)
    assert "largest 1e+10 in layer 10, smallest 10" in described(figure)


def test_layers_come_in_the_order_of_their_numbers() -> None:
    names = ["blocks.10.mlp", "embedding", "blocks.2.mlp", "blocks.2.attention"]
    figure = layer_norms(_norms([(0, name, "weight", 1.0) for name in names]), "weight")
    assert figure["data"][0]["y"] == ["blocks.2.attention", "blocks.2.mlp", "blocks.10.mlp", "embedding"]


def test_what_is_not_finite_has_a_cross_and_zero_and_nothing_have_no_colour() -> None:
    rows = [(0, "a", "activation", 1.0), (1, "a", "activation", float("nan")), (2, "a", "activation", 0.0)]
    rows += [(0, "b", "activation", 2.0), (1, "b", "activation", 2.0), (2, "b", "activation", float("inf"))]
    figure = _checked(layer_norms(_norms([*rows, (3, "a", "activation", None)]), "activation"))
    crosses = figure["data"][1]
    assert list(zip(crosses["x"], crosses["y"], strict=True)) == [(1, "a"), (2, "b")]
    np.testing.assert_array_equal(
        np.isnan(unpacked(figure["data"][0]["z"])), [[False, True, True, True], [False, False, True, True]]
    )
    assert "not finite first in layer a" in described(figure)


def test_many_steps_share_columns_that_keep_the_largest() -> None:
    rows = [(step, 0, "gradient", 1000.0 if step == 4321 else 1.0) for step in range(10_000)]
    figure = _checked(layer_norms(_norms(rows), "gradient"))
    values = unpacked(figure["data"][0]["customdata"])[0]
    assert len(values) == 1000 and np.flatnonzero(values == 1000).tolist() == [432]
    assert unpacked(figure["data"][0]["x"])[432] == 4320


def test_no_norms_and_only_broken_ones() -> None:
    assert "no norms of weight" in described(_checked(layer_norms(_norms([]), "weight")))
    assert "no norms of weight" in described(_checked(layer_norms(_norms([(0, 0, "gradient", 1.0)]), "weight")))
    assert "not finite first" in described(_checked(layer_norms(_norms([(0, 0, "weight", float("nan"))]), "weight")))
    assert "no finite value" in described(_checked(layer_norms(_norms([(0, 0, "weight", None)]), "weight")))


def _collectives(rows: list[tuple[int, int, str, str, int]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [[]] * 5
    types = (pa.int32(), pa.int32(), pa.string(), pa.string(), pa.int64())
    names = ("rank", "peer", "name", "group", "bytes")
    return pa.table({n: pa.array(list(v), t) for n, v, t in zip(names, columns, types, strict=True)})


def _pairs(rows: list[tuple[int, int, str, str, int]], groups: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    sources, targets, amounts, _ = pair_bytes(_collectives(rows), groups)
    return {(int(a), int(b)): float(c) for a, b, c in zip(sources, targets, amounts, strict=True)}


def test_a_message_counts_once_from_its_sender() -> None:
    both = [(0, 1, "send", "pipeline", 100), (1, 0, "receive", "pipeline", 100), (0, 1, "send", "pipeline", 50)]
    assert _pairs(both, []) == {(0, 1): 150}
    assert _pairs([(1, 0, "recv", "pipeline", 100)], []) == {(0, 1): 100}


def test_a_collective_goes_around_a_ring_and_an_all_to_all_to_all() -> None:
    groups = [{"group": "shard", "ranks": [0, 2, 5]}, {"group": "tensor", "ranks": [0]}]
    ring = [(rank, -1, "all_gather", "shard", 30) for rank in (0, 2, 5)]
    assert _pairs(ring, groups) == {(0, 2): 30, (2, 5): 30, (5, 0): 30}
    assert _pairs([(2, -1, "all_to_all", "shard", 30)], groups) == {(2, 0): 15, (2, 5): 15}
    assert _pairs([(0, -1, "all_reduce", "tensor", 30)], groups) == {}  # alone in its group
    assert pair_bytes(_collectives([(7, -1, "all_reduce", "shard", 30)]), groups)[3] == 30


def test_the_matrix_has_senders_as_rows_and_says_the_most() -> None:
    groups = [{"group": "shard", "ranks": [0, 1, 2]}]
    rows = [(rank, -1, "all_reduce", "shard", 2**20) for rank in range(3)] + [(2, 0, "send", "pipeline", 2**30)]
    figure = _checked(communication_matrix(_collectives([*rows, (9, -1, "all_reduce", "?", 2**30)]), groups))
    found = unpacked(figure["data"][0]["customdata"])
    np.testing.assert_allclose(found * 2**10, [[0, 1, 0], [0, 0, 1], [1025, 0, 0]], rtol=1e-6)
    assert "most, 1 GiB, from rank 2 to rank 0" in described(figure)
    assert "50 % of bytes have no known group" in figure["layout"]["title"]["text"]


def test_no_bytes_is_said() -> None:
    assert "no collective" in described(_checked(communication_matrix(_collectives([]), [])))
    assert "no collective" in described(_checked(communication_matrix(_collectives([(0, 1, "send", "", 0)]), [])))


def test_twelve_thousand_ranks_are_blocks_and_quick() -> None:
    ranks = np.arange(12_288)
    spans = pa.table(
        {
            "rank": np.tile(ranks, 2),
            "peer": np.full(2 * 12_288, -1),
            "name": ["all_gather"] * 12_288 + ["all_reduce"] * 12_288,
            "group": ["tensor"] * 12_288 + ["shard"] * 12_288,
            "bytes": np.full(2 * 12_288, 2**20),
        }
    )
    groups = [{"group": "tensor", "ranks": list(range(i, i + 8))} for i in range(0, 12_288, 8)]
    groups += [{"group": "shard", "ranks": list(range(i, 12_288, 64))} for i in range(64)]
    begin = time.process_time()
    figure = communication_matrix(spans, groups)
    assert time.process_time() - begin < 1.5  # 0.4 s on a machine that does nothing else
    found = unpacked(figure["data"][0]["customdata"])
    assert found.shape == (384, 384) and "blocks of 32 ranks" in figure["layout"]["title"]["text"]
    np.testing.assert_allclose(found[0, :4], [32, 0, 32, 0])  # tensor groups inside; shard neighbours 64 ranks on
    assert found.sum() == pytest.approx(2 * 12_288)
