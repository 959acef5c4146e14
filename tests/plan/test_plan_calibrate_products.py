"""Products looked up between measured ones: plain numbers and arrays agree, and nothing overshoots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan.hardware.device_model import LogGrid, TableGemm

TOKENS, WIDTHS = (128.0, 512.0, 2048.0), (128.0, 384.0, 1024.0, 2048.0)
sizes = st.integers(1, 20_000)


def table(seed: int = 0) -> TableGemm:
    random = np.random.default_rng(seed)
    rates = [LogGrid((TOKENS, WIDTHS, WIDTHS), random.uniform(1e10, 9e10, (12, 4)).tolist()) for _ in range(2)]
    return TableGemm(*rates, "measured", "here")


@given(m=sizes, n=sizes, k=sizes, gradient=st.booleans(), seed=st.integers(0, 50))
@settings(max_examples=150, deadline=None)
def test_arrays_and_plain_numbers_agree(m: int, n: int, k: int, gradient: bool, seed: int) -> None:
    gemm = table(seed)
    plain = gemm.seconds(m, n, k, 3, gradient)
    many = gemm.seconds(np.array([m, 1]), np.array([n, 7]), np.array([k, 9]), np.array([3, 1]), gradient)
    assert many[0] == pytest.approx(plain, rel=1e-9)
    assert gemm.seconds(np.array([float(m)]), n, k, 3, gradient)[0] == pytest.approx(plain, rel=1e-9)


@given(m=sizes, n=sizes, k=sizes, gradient=st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_rate_is_beyond_those_around_it(m: int, n: int, k: int, gradient: bool) -> None:
    gemm = table()
    rates = np.array((gemm.weight_gradients if gradient else gemm.products).rows)
    rate = 2.0 * m * n * k / gemm.seconds(m, n, k, weight_gradient=gradient)
    assert rates.min() * (1 - 1e-9) <= rate <= rates.max() * (1 + 1e-9)


def test_measured_sizes_have_their_own_rate_and_others_one_between() -> None:
    gemm = table()
    of = dict(zip([(t, r) for t in TOKENS for r in WIDTHS], gemm.products.rows, strict=True))
    assert 2 * 512 * 384 * 1024 / gemm.seconds(512, 384, 1024) == pytest.approx(of[512.0, 384.0][2])
    between = 2 * 1024 * 384 * 1024 / gemm.seconds(1024, 384, 1024)  # half-way between 512 and 2,048
    assert between == pytest.approx((of[512.0, 384.0][2] * of[2048.0, 384.0][2]) ** 0.5)
    assert 2 * 9e9 / gemm.seconds(9e3, 1e3, 1e3) == pytest.approx(2 * 2048e6 / gemm.seconds(2048, 1e3, 1e3))


def test_a_weight_gradient_counts_its_tokens_last() -> None:
    gemm = table()
    of = dict(zip([(t, r) for t in TOKENS for r in WIDTHS], gemm.weight_gradients.rows, strict=True))
    seconds = gemm.seconds(384, 1024, 512, weight_gradient=True)  # rows, columns, tokens
    assert 2 * 384 * 1024 * 512 / seconds == pytest.approx(of[512.0, 384.0][2])
