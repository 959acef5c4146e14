"""The heat map of ranks: ratios to the median of those alike, and who is slow by name."""

from __future__ import annotations

import json
import time

import numpy as np
import plotly.graph_objects
import pyarrow as pa
import pytest

from phalanx.figures.rank_heatmap import rank_heatmap
from phalanx.figures.series import unpacked
from phalanx.figures.style import Figure, described


def _checked(figure: Figure) -> Figure:
    plotly.graph_objects.Figure(figure)
    json.dumps(figure, allow_nan=False)
    return figure


def _averages(forward_s: list[float], wait_s: list[float] | None = None, per_host: int = 2) -> pa.Table:
    count = len(forward_s)
    return pa.table(
        {
            "rank": list(range(count)),
            "host": [f"node-{rank // per_host}" for rank in range(count)],
            "steps": [10] * count,
            "forward_s": forward_s,
            "wait_s": wait_s or [0.1] * count,
            "snapshot_s": [0.0] * count,
        }
    )


def test_cells_are_ratios_to_the_median_and_the_slow_rank_is_named() -> None:
    figure = _checked(rank_heatmap(_averages([0.2, 0.2, 0.2, 0.5, 0.2], [0.3, 0.3, 0.3, 0.03, 0.3])))
    heatmap, rings = figure["data"]
    assert heatmap["x"] == ["forward", "wait"]  # nobody has taken a snapshot
    np.testing.assert_allclose(unpacked(heatmap["z"])[:, 0], [1, 1, 1, 2.5, 1])
    np.testing.assert_allclose(unpacked(heatmap["z"])[:, 1], [1, 1, 1, 0.1, 1], rtol=1e-6)
    np.testing.assert_allclose(unpacked(heatmap["customdata"])[3], [0.5, 0.03], rtol=1e-6)
    assert (rings["x"], rings["y"]) == (["forward"], [3])
    assert figure["layout"]["title"]["text"] == "5 ranks: rank 3 (node-1) 2.50× in forward"
    assert heatmap["text"][3] == ["node-1", "node-1"]


def test_who_waits_long_is_not_called_slow() -> None:
    figure = _checked(rank_heatmap(_averages([0.2] * 5, [0.1, 0.1, 0.1, 0.1, 0.9])))
    assert len(figure["data"]) == 1 and "none is slow" in described(figure)


def test_noise_is_not_called_slow() -> None:
    rng = np.random.default_rng(0)
    for spread in (0.001, 0.01, 0.05):
        figure = rank_heatmap(_averages((0.2 * (1 + rng.normal(0, spread, 2000))).tolist()))
        assert "none is slow" in described(figure), spread


def test_stages_of_a_pipeline_are_compared_with_their_own() -> None:
    seconds = [0.2, 0.2, 0.2, 0.2, 0.4, 0.4, 0.4, 0.5]
    alike = [0, 0, 0, 0, 1, 1, 1, 1]
    figure = _checked(rank_heatmap(_averages(seconds), alike=alike))
    np.testing.assert_allclose(unpacked(figure["data"][0]["z"])[:, 0], [1, 1, 1, 1, 1, 1, 1, 1.25])
    assert figure["data"][1]["y"] == [7]


def test_who_was_found_slow_already_is_named_and_nobody_else() -> None:
    averages = _averages([0.2, 0.2, 0.208, 0.2, 0.3])
    assert rank_heatmap(averages, slow=[2])["layout"]["title"]["text"] == "5 ranks: rank 2 (node-1) 1.04× in forward"
    assert "none is slow" in described(_checked(rank_heatmap(averages, slow=[])))


def test_a_host_is_as_slow_as_its_slowest_rank() -> None:
    figure = _checked(rank_heatmap(_averages([0.2, 0.2, 0.2, 0.3, 0.2, 0.2]), by="host"))
    assert figure["data"][0]["y"] == ["node-0", "node-1", "node-2"]
    np.testing.assert_allclose(unpacked(figure["data"][0]["z"])[:, 0], [1, 1.5, 1])
    assert "3 hosts: node-1 1.50× in forward" in figure["layout"]["title"]["text"]


def test_rows_come_in_the_order_of_ranks() -> None:
    averages = _averages([0.1, 0.2, 0.3]).take([2, 0, 1])
    figure = _checked(rank_heatmap(averages))
    assert unpacked(figure["data"][0]["y"]).tolist() == [0, 1, 2]
    np.testing.assert_allclose(unpacked(figure["data"][0]["customdata"])[:, 0], [0.1, 0.2, 0.3], rtol=1e-6)


@pytest.mark.parametrize("forward_s", [[0.2], [float("nan")] * 3, [0.2, float("nan"), 0.2]])
def test_one_rank_and_unknown_seconds(forward_s: list[float]) -> None:
    figure = _checked(rank_heatmap(_averages(forward_s)))
    heatmap = figure["data"][0]
    assert unpacked(heatmap["z"]).shape == (len(forward_s), len(heatmap["x"]))
    assert described(figure).endswith("none is slow" if len(forward_s) > 1 else "too few to compare")
    assert figure["layout"]["title"]["text"].startswith("1 rank: " if len(forward_s) == 1 else "3 ranks: ")
    assert figure["layout"]["yaxis"]["dtick"] == 1  # no rank 0.5


def test_a_fast_one_of_few_hides_no_slow_one_and_doubt_is_no_health() -> None:
    averages = _averages([0.08, 0.1, 0.175])
    assert "rank 2 (node-1) 1.75× in forward" in described(rank_heatmap(averages))
    doubtful = rank_heatmap(averages, slow=[], doubt="rank 2 takes 75% longer, which is not sure")
    assert doubtful["layout"]["title"]["text"] == "3 ranks: rank 2 takes 75% longer, which is not sure"


def test_no_rank_and_no_time() -> None:
    assert "no spans" in described(_checked(rank_heatmap(_averages([]))))
    assert "no time" in described(_checked(rank_heatmap(_averages([0.0], [0.0]).drop_columns(["wait_s"]))))


def test_twelve_thousand_ranks_stay_small_and_quick() -> None:
    seconds = 0.2 * (1 + np.random.default_rng(0).normal(0, 0.01, 12_288))
    seconds[[77, 9000]] = 0.26, 0.22
    averages = _averages(seconds.tolist(), per_host=8)
    begin = time.process_time()
    figure = rank_heatmap(averages)
    text = json.dumps(figure)
    assert time.process_time() - begin < 1  # 0.02 s on a machine that does nothing else
    assert len(text) < 1e6
    assert figure["data"][1]["y"] == [77, 9000]
    assert unpacked(figure["data"][0]["z"]).shape == (12_288, 2)
    assert (
        "12,288 ranks: rank 77 (node-9) 1.30× in forward; rank 9000 (node-1125) 1.10×"
        in figure["layout"]["title"]["text"]
    )
