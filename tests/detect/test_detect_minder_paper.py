"""The paper's Minder and its baselines: distances, thresholds, statistics of windows, who is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.detect.minder.mahalanobis import whitened, window_statistics
from phalanx.detect.minder.minder_weights import shipped_numbers
from phalanx.detect.minder.paper_minder import (
    ALL_METRICS,
    Variant,
    deviations_of,
    find_first,
    score_limit,
    window_scores,
)
from phalanx.detect.minder.similarity import (
    candidates,
    distance_sums,
    first_steady,
    largest_score,
    steady_score,
    z_scores,
)
from phalanx.detect.monitoring.metric_catalogue import DETECTED
from phalanx.detect.monitoring.metric_table import MetricTable


@pytest.mark.parametrize("distance", ["euclidean", "manhattan", "chebyshev"])
def test_distances_from_some_machines_stand_for_those_from_all(distance: str) -> None:
    random = np.random.default_rng(3)
    embeddings = random.standard_normal((4, 500, 3)).astype(np.float32)
    embeddings[:, 77] += 8
    exact = distance_sums(embeddings, distance, references=500)  # type: ignore[arg-type]
    near = distance_sums(embeddings, distance)  # type: ignore[arg-type]
    assert np.abs(near / exact - 1).max() < 0.2
    assert np.abs(near / exact - 1).mean() < 0.06
    assert (z_scores(near).argmax(axis=0) == 77).all()


def test_distance_sums_are_the_sums_of_distances() -> None:
    points = np.array([[0, 3, 0], [0, 0, 4]], np.float32)[..., None]
    assert distance_sums(points)[:, 0].tolist() == [7, 8, 9]
    assert distance_sums(points, "manhattan")[:, 0].tolist() == [7, 10, 11]
    assert distance_sums(points, "chebyshev")[:, 0].tolist() == [7, 7, 8]


@settings(max_examples=40)
@given(st.integers(2, 30), st.integers(0, 2**32 - 1))
def test_no_z_score_exceeds_what_so_many_machines_allow(machines: int, seed: int) -> None:
    sums = np.random.default_rng(seed).exponential(1, (machines, 5)).astype(np.float32) ** 3
    assert z_scores(sums).max() <= largest_score(machines) + 1e-3


@settings(max_examples=60)
@given(st.integers(3, 300), st.floats(0.01, 100), st.integers(0, 2**32 - 1))
def test_a_threshold_in_deviations_of_the_others_is_the_same_as_one_of_the_score(
    machines: int, deviations: float, seed: int
) -> None:
    sums = np.random.default_rng(seed).standard_normal(machines)
    sums[0] = sums[1:].mean() + deviations * sums[1:].std()
    of_first = (sums[0] - sums.mean()) / sums.std()
    assert score_limit(deviations, machines) == pytest.approx(of_first, rel=1e-6)
    assert deviations_of(of_first, machines) == pytest.approx(deviations, rel=1e-3)
    assert deviations_of(largest_score(machines), machines) == float("inf")


@settings(max_examples=60)
@given(st.integers(3, 6), st.integers(5, 60), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_the_steady_score_is_the_threshold_at_which_nobody_is_called_faulty(
    machines: int, windows: int, continuity: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    scores = random.random((machines, windows)).astype(np.float32)
    scores[1, windows // 3 :] += 1
    who, score = candidates(scores)
    least = steady_score(who, score, continuity)
    assert first_steady(who, score, least, continuity) is None
    if least > 0:
        found = first_steady(who, score, least - 1e-4, continuity)
        assert found is not None
        machine, start = found
        assert (scores[:, start : start + continuity].argmax(axis=0) == machine).all()


def test_the_first_to_be_steady_counts_and_runs_begin_where_the_threshold_is_exceeded() -> None:
    who = np.array([2, 2, 2, 1, 1, 1, 1, 0])
    score = np.array([1, 5, 5, 5, 5, 5, 1, 9], np.float32)
    assert first_steady(who, score, 2.0, 2) == (2, 1)
    assert first_steady(who, score, 2.0, 3) == (1, 3)
    assert first_steady(who, score, 0.0, 4) == (1, 3)
    assert first_steady(who, score, 2.0, 4) is None
    assert steady_score(who, score, 3) == 5 and steady_score(who, score, 4) == 1 and steady_score(who, score, 5) == 0


@pytest.mark.parametrize("representation", ["embedding", "raw", "joined", "one_model"])
def test_the_method_of_the_paper_and_its_variants_find_a_machine_that_is_far_off(representation: str) -> None:
    random = np.random.default_rng(5)
    values = (0.5 + 0.01 * random.standard_normal((7, 10, 400))).astype(np.float32)
    values[:, 6, 100:] = 0.05
    table = MetricTable(values, DETECTED, tuple("abcdefghij"), 0.0)
    variant = Variant(representation, DETECTED)  # type: ignore[arg-type]
    assert variant.looks == (DETECTED if representation in ("embedding", "raw") else (ALL_METRICS,))
    found = find_first(table, variant, shipped_numbers().encoders, dict.fromkeys(variant.looks, 5.0))
    assert found is not None
    assert found.machine == 6 and 95 <= found.since <= 115 and found.found == found.since + 239


def test_without_continuity_one_window_is_enough_and_the_first_metric_that_finds_one_is_told() -> None:
    values = (0.5 + 0.01 * np.random.default_rng(7).standard_normal((2, 12, 400))).astype(np.float32)
    values[0, 3, 200:230] = 0.1
    values[1, 5, 50:] = 0.1
    table = MetricTable(values, DETECTED[:2], tuple("abcdefghijkl"), 0.0)
    raw, limits = Variant("raw", DETECTED[:2]), dict.fromkeys(DETECTED[:2], 20.0)
    found = find_first(table, raw, {}, limits)
    assert found is not None and (found.machine, found.metric) == (5, DETECTED[1])
    at_once = find_first(table, Variant("raw", DETECTED[:2], has_continuity=False), {}, limits)
    assert at_once is not None and (at_once.machine, at_once.metric) == (3, DETECTED[0])
    assert 200 <= at_once.since == at_once.found <= 207
    assert find_first(table, raw, {}, dict.fromkeys(DETECTED[:2], 1e6)) is None


def test_statistics_of_windows_are_their_moments() -> None:
    samples = np.random.default_rng(9).random((3, 20), np.float32)
    found = window_statistics(samples)
    assert found.shape == (4, 3, 13)
    window = samples[1, 5:13].astype(np.float64)
    away = window - window.mean()
    variance = (away**2).mean()
    expected = [window.mean(), variance, (away**3).mean() / variance**1.5, (away**4).mean() / variance**2]
    np.testing.assert_allclose(found[:, 1, 5], expected, rtol=1e-4)
    constant = window_statistics(np.full((1, 9), 0.3, np.float32))
    np.testing.assert_allclose(constant[1:], 0, atol=1e-6)


def test_whitened_features_have_unit_variance_and_do_not_depend_on_their_scale() -> None:
    features = np.random.default_rng(10).standard_normal((5, 20, 30)).astype(np.float32)
    features[1] += features[0]
    found = whitened(features)
    flat = found.reshape(len(found), -1)
    np.testing.assert_allclose(np.cov(flat), np.eye(len(found)), atol=1e-3)
    scaled = whitened(features * np.array([1, 100, 0.01, 5, 7], np.float32)[:, None, None] + 3)
    np.testing.assert_allclose(distance_sums(scaled), distance_sums(found), rtol=1e-2)


def test_mahalanobis_counts_a_difference_in_the_spread_of_its_direction() -> None:
    random = np.random.default_rng(8)
    values = (0.5 + 0.01 * random.standard_normal((2, 30, 300))).astype(np.float32)
    values[1] *= 20
    values[0, 4] += 0.05  # five deviations, of a metric that is small
    values[1, 9] += 0.05  # a quarter of one, of a metric that is large
    table = MetricTable(values, DETECTED[:2], tuple(f"h{one}" for one in range(30)), 0.0)
    ((_, scores),) = window_scores(table, Variant("mahalanobis", DETECTED[:2]), {})
    middle = np.median(scores, axis=1)
    assert middle.argmax() == 4
    assert middle[4] > 2 and abs(middle[9]) < 1
