"""Where a noisy series begins to grow: found, told apart, and not seen where there is only noise."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.detect.drift.change_points import ChangePolicy, find_change, find_changes, find_jump_at, without_outliers

POLICY = ChangePolicy()


def _noise(seed: int, count: int, kind: str) -> np.ndarray:
    random = np.random.default_rng(seed)
    noise = random.normal(0, 0.01, count)
    if kind == "lasting":
        for place in range(1, count):
            noise[place] += 0.8 * noise[place - 1]
    if kind == "stalls":
        noise += (random.random(count) < 0.03) * np.minimum(random.pareto(1.5, count), 20) * 0.3
    if kind == "periodic":
        noise[::25] += 0.5
    return np.exp(noise)


@pytest.mark.parametrize("kind", ["plain", "lasting", "stalls", "periodic"])
def test_noise_alone_is_no_change(kind: str) -> None:
    found = [find_change(_noise(seed, count, kind), POLICY) for seed in range(40) for count in (60, 300, 1000)]
    assert not [one for one in found if one is not None]


@pytest.mark.parametrize("kind", ["plain", "stalls", "periodic"])
@pytest.mark.parametrize("count", [100, 400, 3000])
def test_a_jump_is_found_where_it_is(kind: str, count: int) -> None:
    for seed in range(5):
        series = _noise(seed, count, kind)
        series[count // 2 :] *= 1.06
        found = find_change(series, POLICY)
        assert found is not None
        assert found.shape == "jump"
        assert abs(found.onset - count // 2) <= 3
        assert found.growth == pytest.approx(0.06, abs=0.02)
        assert not found.is_over


@pytest.mark.parametrize("count", [200, 1000, 5000])
def test_a_creep_is_told_from_a_jump(count: int) -> None:
    for seed in range(5):
        onset = count // 4
        series = _noise(seed, count, "plain")
        series[onset:] *= 1 + np.linspace(0, 0.15, count - onset)
        found = find_change(series, POLICY)
        assert found is not None
        assert found.shape == "creep"
        assert abs(found.onset - onset) < 0.1 * count
        assert found.growth == pytest.approx(0.15, abs=0.03)


def test_a_creep_may_begin_with_the_first_value() -> None:
    series = _noise(0, 300, "plain") * (1 + np.linspace(0, 0.2, 300))
    found = find_change(series, POLICY)
    assert found is not None
    assert (found.shape, found.onset) == ("creep", 0)


def test_what_falls_is_no_growth() -> None:
    series = _noise(0, 300, "plain")
    series[:100] *= 1.2
    assert find_change(series, POLICY) is None
    assert find_change(series[::-1], POLICY) is not None


def test_less_than_the_least_growth_is_left_alone() -> None:
    series = _noise(0, 2000, "plain")
    series[1000:] *= 1.03
    assert find_change(series, POLICY) is not None
    assert find_change(series, ChangePolicy(least_growth=0.05)) is None


def test_what_came_back_is_said_to_be_over() -> None:
    series = _noise(0, 400, "plain")
    series[150:370] *= 1.2
    found = find_change(series, POLICY)
    assert found is None or found.is_over


@pytest.mark.parametrize(
    "series", [[], [1.0] * 39, [1.0] * 400, [0.0] * 400, [1.0] * 50 + [float("nan")] + [1.0] * 50], ids=len
)
def test_short_flat_and_broken_series_have_no_change(series: list[float]) -> None:
    assert find_change(series, POLICY) is None


def test_a_known_onset_is_tested_there() -> None:
    series = np.concatenate([_noise(0, 60, "plain"), 1.1 * _noise(1, 60, "plain")])
    found = find_jump_at(series, 60, POLICY)
    assert found is not None
    assert found.growth == pytest.approx(0.1, abs=0.01)
    assert find_jump_at(_noise(2, 120, "plain"), 60, POLICY) is None
    assert find_jump_at(series, 5, POLICY) is None


def test_single_outliers_go_and_levels_stay() -> None:
    series = np.ones(100)
    series[[20, 60]] = 50.0
    series[70:] = 2.0
    smooth = without_outliers(series + np.random.default_rng(0).normal(0, 0.01, 100))
    assert smooth[:68].max() < 1.1
    assert smooth[72:].min() > 1.9


def _stairs(*heights: tuple[int, float]) -> np.ndarray:
    """Noise of 500 values, higher by these shares from these values on."""
    return _noise(1, 500, "plain") * (1 + sum(height * (np.arange(500) >= at) for at, height in heights))


@pytest.mark.parametrize(("first", "second"), [(0.1, 0.2), (0.2, 0.1), (0.1, 0.1), (0.05, 0.3), (0.5, 0.5)])
def test_two_jumps_are_told_apart_the_larger_first(first: float, second: float) -> None:
    found = find_changes(_stairs((150, first), (350, second)), POLICY)
    expected = sorted([(first, 150), (second / (1 + first), 350)], reverse=True)
    assert [one.shape for one, _, _ in found] == ["jump", "jump"]
    for (change, begin, _), (growth, onset) in zip(found, expected, strict=True):
        assert abs(change.growth - growth) < 0.01
        assert abs(begin + change.onset - onset) <= 3
        assert not change.is_over


def test_of_a_jump_that_was_partly_taken_back_the_rest_counts() -> None:
    ((change, begin, _),) = find_changes(_stairs((150, 0.3), (350, -0.2)), POLICY)
    assert (begin + change.onset, change.is_over) == (150, False)
    assert abs(change.growth - 0.1) < 0.01


def test_a_jump_that_was_taken_back_is_over_and_the_next_counts() -> None:
    found = find_changes(_stairs((150, 0.3), (250, -0.3), (350, 0.3)), POLICY)
    assert [(begin + change.onset, change.is_over) for change, begin, _ in found] == [(350, False), (150, True)]


def test_several_levels_that_end_as_they_began_are_no_change() -> None:
    for heights in ([(100, -0.2), (300, 0.2)], [(100, 0.2), (200, -0.2), (300, 0.1), (400, -0.1)]):
        assert all(change.is_over for change, _, _ in find_changes(_stairs(*heights), POLICY))


@pytest.mark.parametrize("kind", ["plain", "lasting", "stalls", "periodic"])
def test_noise_has_no_levels(kind: str) -> None:
    for seed in range(20):
        for count in (60, 300, 1000):
            assert find_changes(_noise(seed, count, kind), POLICY) == []


def test_one_creep_is_no_stairs() -> None:
    for onset in (0, 200):
        creep = _noise(2, 500, "plain") * (1 + 0.2 * np.clip((np.arange(500) - onset) / (500 - onset), 0, 1))
        assert [one.shape for one, _, _ in find_changes(creep, POLICY)] == ["creep"]
