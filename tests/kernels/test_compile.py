"""The kernels inside torch.compile: one graph, and the numbers of eager execution."""

import pytest
import torch

from phalanx.kernels.attention import attention
from phalanx.kernels.counter import dropout
from phalanx.kernels.loss import linear_cross_entropy
from phalanx.kernels.masks import AttentionMask
from phalanx.kernels.pointwise import rms_norm


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 30])
def test_one_graph_and_equal_numbers(window):
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, 2, 256, 16, generator=generator).requires_grad_() for _ in range(3)]
    weight = torch.randn(500, 16, generator=generator).requires_grad_()
    scale = torch.ones(16, requires_grad=True)
    targets, rows = torch.randint(500, (512,), generator=generator), torch.arange(512)

    def step(q, k, v, mask):
        out = attention(q, k, v, mask=mask).reshape(512, 16)
        hidden = rms_norm(dropout(out, 0.1, 123, rows), scale, 1e-6)
        loss, z = linear_cross_entropy(hidden, weight, targets, chunk=128, z_loss=1e-3)
        return loss + z

    def gradients(function):
        loss = function(*qkv, AttentionMask(256, 256, window=window))
        return loss, *torch.autograd.grad(loss, (*qkv, weight, scale))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for a, b in zip(gradients(compiled), gradients(step), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
