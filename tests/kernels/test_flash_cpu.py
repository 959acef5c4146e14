"""What the two private aten operators must do; a torch that changes them fails here first."""

import pytest
import torch
import torch.nn.functional as F

from phalanx.kernels import attention_aten

pytestmark = pytest.mark.skipif(not attention_aten.is_available(), reason="this torch lacks the CPU flash operators")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_out_lse_and_gradients(dtype, groups):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 20, 16, dtype=dtype, generator=generator, requires_grad=True)
    k, v = (torch.randn(2, groups, 33, 16, dtype=dtype, generator=generator, requires_grad=True) for _ in range(2))
    bias = torch.zeros(2, 1, 20, 33, dtype=dtype).masked_fill(
        torch.rand(2, 1, 20, 33, generator=generator) < 0.5, -torch.inf
    )
    bias[..., 0] = 0
    kk, vv = (x.repeat_interleave(4 // groups, 1) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, kk, vv, attn_mask=bias, scale=0.2)
    grad = torch.randn(expected.shape, dtype=dtype, generator=generator)
    with torch.no_grad():
        out, lse = attention_aten.cpu_forward(q, k, v, bias, 0.2)
        grads = attention_aten.cpu_backward(grad, q, k, v, out, lse, bias, 0.2)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out, expected, **tolerance)
    scores = (q @ kk.transpose(-1, -2)) * 0.2 + bias
    torch.testing.assert_close(lse.to(dtype), scores.logsumexp(-1), **tolerance)
    for got, want in zip(grads, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(got, want, **tolerance)
