"""The kernels inside torch.compile: one graph, and the numbers of eager execution."""

import pytest
import torch
from torch._dynamo.utils import counters

from phalanx.kernels.attention import attention
from phalanx.kernels.counter import dropout
from phalanx.kernels.loss import linear_cross_entropy
from phalanx.kernels.masks import AttentionMask
from phalanx.kernels.pointwise import rms_norm


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("chunked", torch.float32), ("chunked", torch.bfloat16), ("math", torch.float32), ("sdpa", torch.float32)],
)
@pytest.mark.parametrize("restricted", [False, True])
def test_layers_that_share_a_mask_are_compiled_once(backend, dtype, restricted):
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, 2, 70, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    documents = torch.arange(70).expand(2, 70) // 40

    def layer(q, k, v, mask):
        return torch.tanh(attention(q, k, v, mask=mask, backend=backend)).contiguous()  # as the queries are

    def gradients(function):
        mask = AttentionMask(70, 70, window=20, documents_BS=documents) if restricted else AttentionMask(70, 70)
        out = function(function(*qkv, mask), *qkv[1:], mask)
        return out, *torch.autograd.grad(out.float().square().sum(), qkv)

    expected = gradients(layer)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        for a, b in zip(gradients(compiled), expected, strict=True):
            torch.testing.assert_close(a, b)
    assert counters["stats"]["unique_graphs"] == 1


def test_blocks_of_a_window_have_their_gradients_in_what_is_compiled():
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, 2, 300, 8, generator=generator).requires_grad_() for _ in range(3)]

    def gradients(function):
        return torch.autograd.grad(function(*qkv, window=20, backend="chunked").square().sum(), qkv)

    torch.compiler.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for a, b in zip(gradients(compiled), gradients(attention), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


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
