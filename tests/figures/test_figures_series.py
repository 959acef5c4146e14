"""Long series: smoothing by its definition, fewer points that keep every spike, arrays in Plotly's binary form."""

from __future__ import annotations

import json

import numpy as np
import plotly.graph_objects
import pytest

from phalanx.figures.series import fewer, packed, smoothed, unpacked


def _by_definition(values: np.ndarray, span: float) -> np.ndarray:
    """Weights of each value and all before it, one by one."""
    decay = 1 - 2 / (span + 1)
    found = []
    for t, here in enumerate(values):
        weights = decay ** np.arange(t, -1, -1) * np.isfinite(values[: t + 1])
        known = np.nan_to_num(values[: t + 1], nan=0.0, posinf=0.0, neginf=0.0)
        found.append((weights * known).sum() / weights.sum() if np.isfinite(here) else np.nan)
    return np.array(found)


@pytest.mark.parametrize("span", [1, 1.5, 2, 10, 500, 1e6])
@pytest.mark.parametrize("broken", [(), (0, 1, 5, 200), (299,)])
def test_smoothing_is_the_weighted_mean_of_what_came_before(span: float, broken: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(3, 1, 300)
    values[list(broken)] = np.nan
    expected = values if span <= 1 else _by_definition(values, span)
    np.testing.assert_allclose(smoothed(values, span), expected, rtol=1e-9)


def test_smoothing_takes_very_large_and_no_values() -> None:
    assert smoothed(np.zeros(0), 10).shape == (0,)
    assert smoothed(np.array([1e300, 1e300]), 10).tolist() == pytest.approx([1e300, 1e300])


def test_fewer_points_keep_the_ends_and_every_spike() -> None:
    values = np.random.default_rng(1).normal(0, 0.1, 100_003)
    values[[7, 54_321, 100_001]] = 50, -60, 70
    places = fewer(values, 2000)
    assert len(places) <= 2002 and (np.diff(places) > 0).all()
    assert {0, 7, 54_321, 100_001, 100_002} <= set(places.tolist())
    assert fewer(values[:1999], 2000).tolist() == list(range(1999))


def test_fewer_points_break_where_a_stretch_has_no_number() -> None:
    values = np.ones(10_000)
    values[4000:6000] = np.nan
    values[100] = np.inf
    kept = values[fewer(values, 200)]
    assert np.isnan(kept).sum() > 10 and np.isfinite(kept).sum() > 70 and not np.isinf(kept).any()
    assert np.isnan(values[fewer(np.full(5000, np.nan), 100)][:1]).size == 1


def test_a_packed_array_is_the_array_and_plotly_s_own_form() -> None:
    arrays = [
        np.arange(12).reshape(3, 4),
        np.array([0.25, np.nan, -3.5]),
        np.array([1.7e9 + 0.5, 2.0]),
        np.array([2**40, 1]),
        np.zeros(0),
        np.array([True, False]),
    ]
    for array in arrays:
        np.testing.assert_array_equal(unpacked(packed(array)), array)
    assert [packed(array)["dtype"] for array in arrays] == ["i4", "f4", "f8", "f8", "f4", "i4"]
    theirs = json.loads(plotly.graph_objects.Figure(plotly.graph_objects.Heatmap(z=np.eye(3, dtype="f4"))).to_json())
    assert theirs["data"][0]["z"] == packed(np.eye(3))
