"""Attention, kernels that only move bytes, and the curves that both are read from."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.hardware import device_names, load_device
from phalanx.plan.hardware.device_model import LogCurve, LogGrid

DEVICES = {name: load_device(name) for name in device_names()}
EVERY = pytest.mark.parametrize("name", list(DEVICES))


@EVERY
@given(queries=st.integers(1, 200_000), head_dim=st.integers(16, 512), backward=st.booleans())
def test_attention_never_beats_the_peak(name: str, queries: int, head_dim: int, backward: bool) -> None:
    device = DEVICES[name]
    assert device.attention_s(1e12, queries, head_dim, backward=backward) > 1e12 / device.peak_flops_per_s()


@EVERY
@given(queries=st.integers(1, 100_000), more=st.floats(1, 4), head_dim=st.integers(16, 512))
def test_longer_sequences_take_longer_and_run_no_slower(name: str, queries: int, more: float, head_dim: int) -> None:
    device, longer = DEVICES[name], math.ceil(queries * more)
    flops, more_flops = 2 * queries**2 * head_dim, 2 * longer**2 * head_dim
    seconds, more_s = device.attention_s(flops, queries, head_dim), device.attention_s(more_flops, longer, head_dim)
    assert more_s >= seconds
    assert more_flops / more_s >= flops / seconds * (1 - 1e-9)


def test_backward_runs_at_a_lower_rate_than_forward() -> None:
    for name in ("a100_sxm_80gb", "h100_sxm"):
        device = DEVICES[name]
        assert device.attention_s(1e12, 2048, 128, backward=True) > device.attention_s(1e12, 2048, 128)


def test_attention_is_what_its_sources_say() -> None:
    """A100: 178 to 187 TFLOP/s where nothing is masked; H100 at 8,192, causal: 630 and 532."""
    a100, h100 = DEVICES["a100_sxm_80gb"], DEVICES["h100_sxm"]
    assert 1e12 / a100.attention_s(1e12, 65536, 128) == pytest.approx(185e12, rel=0.03)
    assert 1e12 / h100.attention_s(1e12, 8192, 128) == pytest.approx(630e12, rel=0.02)
    assert 1e12 / h100.attention_s(1e12, 8192, 128, backward=True) == pytest.approx(532e12, rel=0.02)


def test_a_head_size_between_two_is_between_them() -> None:
    device = DEVICES["a100_sxm_80gb"]
    times = [device.attention_s(1e12, 2048, size) for size in (32, 64, 96, 128, 192, 256, 300)]
    assert times == sorted(times, reverse=True)
    assert times[0] == times[1]
    assert times[1] > times[2] > times[3] > times[4] > times[5] == times[6]


def test_attention_takes_arrays() -> None:
    device, queries = DEVICES["h100_sxm"], np.array([100, 2048, 5000])
    expected = [device.attention_s(1e12, int(each), 96) for each in queries]
    np.testing.assert_allclose(device.attention_s(1e12, queries, 96), expected, rtol=1e-12)


@EVERY
@given(num_bytes=st.integers(0, 10**11), more=st.integers(0, 10**9))
def test_moving_more_takes_longer_and_never_beats_the_memory(name: str, num_bytes: int, more: int) -> None:
    device = DEVICES[name]
    assert device.stream_s(num_bytes) >= num_bytes / device.memory_bytes_per_s
    assert device.stream_s(num_bytes + more) >= device.stream_s(num_bytes)


def test_small_kernels_reach_less_of_the_memory_than_large_ones() -> None:
    device = DEVICES["a100_sxm_80gb"]
    rates = [size / device.stream_s(size) / device.memory_bytes_per_s for size in (1e5, 1e6, 1e7, 1e9)]
    assert rates == sorted(rates)
    assert rates[0] < 0.05
    assert rates[-1] == pytest.approx(0.88, abs=0.01)


def test_a_curve_goes_through_its_points_and_straight_between() -> None:
    curve = LogCurve((1, 100), (10, 1000))
    assert [curve.at(x) for x in (0.1, 1, 10, 100, 1000)] == pytest.approx([10, 10, 100, 1000, 1000])
    assert LogCurve((1, 100), (10, 1000), grows=True).at(10_000) == pytest.approx(100_000)


@given(x=st.floats(1e-3, 1e6), y=st.floats(1e-3, 1e6))
def test_a_grid_gives_numbers_and_arrays_alike(x: float, y: float) -> None:
    grid = LogGrid(((0.1, 1, 50), (2, 64, 1000)), ((1, 2, 3), (1.5, 0.5, 4), (1, 1, 9)))
    assert grid.at(np.array([x, x]), np.array([y, y])) == pytest.approx([grid.at(x, y)] * 2)
    assert 0.5 <= grid.at(x, y) <= 9 * (1 + 1e-9)


def test_a_grid_goes_through_its_points() -> None:
    grid = LogGrid(((1, 4), (1, 4)), ((1, 4), (16, 64)))
    assert (grid.at(1, 4), grid.at(4, 1)) == pytest.approx((4, 16))
    assert grid.at(2, 2) == pytest.approx(8)
