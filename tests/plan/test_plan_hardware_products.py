"""Times of matrix products: close to what was measured, never beyond what the chip can do."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hardware_rows import A100_PRODUCTS, H100_PRODUCTS
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.hardware import device_names, load_device
from phalanx.plan.hardware.device_model import Clock, TileGemm

GPUS = [name for name in device_names() if name != "cpu_host"]
SIDES = st.integers(min_value=16, max_value=65536)


def test_products_of_an_a100_are_as_measured() -> None:
    errors = _errors("a100_sxm_80gb", A100_PRODUCTS)
    assert np.abs(errors).mean() < 0.06
    assert abs(errors.mean()) < 0.03


def test_products_of_an_h100_are_as_measured() -> None:
    errors = _errors("h100_sxm", H100_PRODUCTS)
    assert np.abs(errors).mean() < 0.08
    assert abs(errors.mean()) < 0.04


def _errors(name: str, rows: tuple[tuple[int, int, int, float], ...]) -> np.ndarray:
    gemm = load_device(name).gemms["half"]
    assert isinstance(gemm, TileGemm)
    return np.array([math.log(gemm.seconds(m, n, k, alone=True) / (us * 1e-6)) for m, n, k, us in rows])


@pytest.mark.parametrize("name", GPUS)
@given(m=SIDES, n=SIDES, k=SIDES, batch=st.integers(min_value=1, max_value=512))
def test_no_product_beats_the_data_sheet(name: str, m: int, n: int, k: int, batch: int) -> None:
    device = DEVICES[name]
    seconds = device.gemm_s(m, n, k, batch=batch)
    assert seconds >= 2 * batch * m * n * k / device.peak_flops_per_s() * (1 - 1e-9)
    assert seconds >= 2 * batch * (m * k + n * k + m * n) / device.memory_bytes_per_s * (1 - 1e-9)


@pytest.mark.parametrize("name", GPUS)
@given(m=SIDES, n=SIDES, k=SIDES, batch=st.integers(min_value=1, max_value=64), side=st.integers(0, 3))
def test_twice_the_work_never_takes_much_less_time(name: str, m: int, n: int, k: int, batch: int, side: int) -> None:
    sizes = [m, n, k, batch]
    once = DEVICES[name].gemm_s(m, n, k, batch=batch)
    sizes[side] *= 2
    twice = DEVICES[name].gemm_s(sizes[0], sizes[1], sizes[2], batch=sizes[3])
    assert twice >= 0.85 * once  # measured steps between tiles are not even either


@pytest.mark.parametrize("name", GPUS)
def test_more_work_takes_longer_but_for_one_pair_in_a_hundred(name: str) -> None:
    random = np.random.default_rng(0)
    m, n, k = (np.round(2 ** random.uniform(5, 15.5, 20_000)) for _ in range(3))
    for grown in ((np.ceil(1.1 * m), n, k), (m, np.ceil(1.1 * n), k), (m, n, np.ceil(1.1 * k))):
        ratios = DEVICES[name].gemm_s(*grown) / DEVICES[name].gemm_s(m, n, k)
        assert (ratios < 0.97).mean() < 0.01
        assert ratios.min() > 0.75


@given(sizes=st.lists(st.tuples(SIDES, SIDES, SIDES, st.integers(1, 64)), min_size=1, max_size=6))
def test_arrays_give_what_plain_numbers_give(sizes: list[tuple[int, int, int, int]]) -> None:
    device = DEVICES["a100_sxm_80gb"]
    m, n, k, batch = (np.array(column) for column in zip(*sizes, strict=True))
    expected = [device.gemm_s(*size[:3], batch=size[3]) for size in sizes]
    np.testing.assert_allclose(device.gemm_s(m, n, k, batch=batch), expected, rtol=1e-12)


def test_long_arrays_give_what_short_ones_give_in_their_shape() -> None:
    device, random = DEVICES["h100_sxm"], np.random.default_rng(1)
    m, k = random.integers(64, 8192, (5, 1000)), random.integers(64, 8192, 1000)
    long = device.gemm_s(m, 4608, k)
    assert long.shape == (5, 1000)
    np.testing.assert_allclose(long[3], device.gemm_s(m[3], 4608, k), rtol=1e-12)


def test_precisions_and_passes() -> None:
    device = DEVICES["a100_sxm_80gb"]
    size = (2048, 4608, 12288)
    assert device.gemm_s(*size, "fp16") == device.gemm_s(*size, "bf16")
    assert device.gemm_s(*size, "fp32") > 10 * device.gemm_s(*size, "bf16")
    peak_s = 2 * math.prod(size) / device.peak_flops_per_s()
    points = peak_s / device.gemm_s(*size) - peak_s / device.gemm_s(*size, weight_gradient=True)
    assert 0.05 < points < 0.1


def test_a_batch_of_products_fills_the_device_better_than_one() -> None:
    device = DEVICES["a100_sxm_80gb"]
    assert device.gemm_s(512, 512, 128, batch=64) < 64 * device.gemm_s(512, 512, 128)
    assert device.gemm_s(2048, 2048, 128, batch=12) == pytest.approx(device.gemm_s(2048, 12 * 2048, 128), rel=0.25)


def test_short_products_are_faster_at_full_clock_and_long_ones_are_as_measured() -> None:
    device = DEVICES["a100_sxm_80gb"]
    gemm = device.gemms["half"]
    assert isinstance(gemm, TileGemm)
    short, long = (1024, 4096, 4096), (8192, 65536, 16384)
    assert gemm.seconds(*short, alone=True) < device.gemm_s(*short)
    assert gemm.seconds(*short, alone=True) == pytest.approx(replace(gemm, clock=Clock()).seconds(*short))
    assert gemm.seconds(*long, alone=True) == device.gemm_s(*long)


@pytest.mark.parametrize("name", GPUS)
def test_one_call_takes_microseconds(name: str) -> None:
    device, best = DEVICES[name], math.inf
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            device.gemm_s(2048, 4608, 12288)
        best = min(best, (time.perf_counter() - start) / 50)
    assert best < 100e-6  # 9 us on a quiet machine


DEVICES = {name: load_device(name) for name in GPUS}
