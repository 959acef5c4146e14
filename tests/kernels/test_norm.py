import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.kernels.pointwise import rms_norm


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 20), width=st.integers(1, 70), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_values_and_gradients_equal_torch(rows, width, dtype):
    generator = torch.Generator().manual_seed(rows * 100 + width)
    x = (torch.randn(2, rows, width, dtype=dtype, generator=generator) * 3).requires_grad_()
    weight = torch.rand(width, dtype=dtype, generator=generator).requires_grad_()
    expected, got = F.rms_norm(x, (width,), weight, 1e-5), rms_norm(x, weight, 1e-5)
    tolerance = {"rtol": 1e-11, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got, expected, **tolerance)
    grad = torch.randn(x.shape, dtype=dtype, generator=generator)
    for a, b in zip(
        torch.autograd.grad(got, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(a, b, **tolerance)


def test_result_in_bf16_of_a_stream_in_fp32():
    x, weight = torch.randn(6, 32, requires_grad=True), torch.rand(32, requires_grad=True)
    expected = F.rms_norm(x, (32,), weight, 1e-6).bfloat16()
    got = rms_norm(x, weight, 1e-6, torch.bfloat16)
    torch.testing.assert_close(got, expected)
    grad = torch.randn(6, 32).bfloat16()
    got_grads = torch.autograd.grad(got, (x, weight), grad)
    assert all(g.dtype == torch.float32 for g in got_grads)
    for a, b in zip(got_grads, torch.autograd.grad(expected, (x, weight), grad), strict=True):
        torch.testing.assert_close(a, b)


def test_rows_of_zeros_have_a_finite_gradient():
    x, weight = torch.zeros(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    y = rms_norm(x, weight, 1e-6)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, torch.zeros(3, 8)) and torch.isfinite(dx).all()
    torch.testing.assert_close(dx, torch.full((3, 8), 1e3))


def test_bf16_input_takes_torchs_form():
    x, weight = torch.randn(4, 16).bfloat16(), torch.rand(16)
    assert torch.equal(rms_norm(x, weight, 1e-6), F.rms_norm(x, (16,), weight.bfloat16(), 1e-6))


def test_second_derivatives_are_refused():
    x, weight = torch.randn(4, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    (dx,) = torch.autograd.grad(rms_norm(x, weight, 1e-6).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
