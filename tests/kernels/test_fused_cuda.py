"""What cuDNN's and FlashAttention's private operators must do; and what calls them, on a CPU by stand-ins."""

from __future__ import annotations

import warnings

import pytest
import torch
from fused_on_cpu import fused_on_cpu

from phalanx.core.errors import UserError
from phalanx.kernels import attention_aten
from phalanx.kernels.attention import CausalKernel, attention, choose_backend
from phalanx.kernels.masks import AttentionMask

KERNELS = ("cudnn", "flash")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def tensors(batch, heads, kv_heads, length, size, dtype, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    made = [torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for shape in shapes]
    return [x.requires_grad_() for x in made[:3]], made[3]


def by_math(leaves, grad):
    """The textbook in fp32, and its gradients."""
    wide = [x.detach().float().requires_grad_() for x in leaves]
    out = attention(*wide, backend="math")
    return out, torch.autograd.grad(out, wide, grad.float())


@pytest.mark.parametrize("kernel", KERNELS)
def test_schemas(kernel):
    """torch's operators take what is handed to them, by name; another schema would misplace an argument."""
    name = f"_scaled_dot_product_{kernel}_attention"
    forward, backward = (getattr(torch.ops.aten, n).default._schema for n in (name, name + "_backward"))
    given = [argument.name for argument in forward.arguments]
    bias = ["attn_bias", "compute_log_sumexp"] if kernel == "cudnn" else []
    assert given == ["query", "key", "value", *bias, "dropout_p", "is_causal", "return_debug_mask", "scale"]
    assert [x.name for x in forward.returns][:2] == ["output", "logsumexp"]
    tensors, seeds = ["grad_out", "query", "key", "value", "out", "logsumexp"], ["philox_seed", "philox_offset"]
    lengths, rest = ["cum_seq_q", "cum_seq_k", "max_q", "max_k"], ["dropout_p", "is_causal"]
    expected = [*seeds, "attn_bias", *lengths, *rest] if kernel == "cudnn" else [*lengths, *rest, *seeds]
    assert [argument.name for argument in backward.arguments] == [*tensors, *expected, "scale"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_causal_attention_and_gradients(kernel, kv_heads):
    leaves, grad = tensors(2, 4, kv_heads, 24, 8, torch.float32)
    expected, gradients = by_math(leaves, grad)
    with fused_on_cpu():
        out = attention_aten.causal(kernel, *leaves, None)
        got = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(got, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_blocks_of_keys_add_up(kernel):
    """Two halves of the keys, put together by their log-sum-exp; gradients of each from what is final."""
    leaves, grad = tensors(2, 4, 2, 32, 8, torch.float32)
    expected, gradients = by_math(leaves, grad)
    with fused_on_cpu():
        check_halves(kernel, leaves, grad, expected, gradients, 1e-4)


def check_halves(kernel, leaves, grad, expected, gradients, bound):
    half = grad.shape[2] // 2
    with torch.no_grad():
        q, k, v = (x.detach()[:, :, half:] for x in leaves)
        before = [x.detach()[:, :, :half] for x in leaves[1:]]
        blocks = [(*before, False), (k, v, True)]
        parts = [attention_aten.cuda_forward(kernel, q, *kv, is_causal=c, scale=None) for *kv, c in blocks]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        assert lse.shape == q.shape[:3]
        out = sum(part.float() * (its - lse).exp()[..., None] for part, its in parts)
        late = grad[:, :, half:]
        final = out.to(q.dtype), lse
        back = [
            attention_aten.cuda_backward(kernel, late, q, *kv, *final, is_causal=c, scale=None) for *kv, c in blocks
        ]
    close(out, expected[:, :, half:], bound)
    close(back[0][0].float() + back[1][0].float(), gradients[0][:, :, half:], bound)
    for index in (1, 2):  # nobody but late queries sees late keys
        close(back[1][index], gradients[index][:, :, half:], bound)


def close(got, expected, bound):
    """Rows as long as expected, but for `bound`; elements of 16 bits alone are rounded more coarsely."""
    got, expected = got.float(), expected.detach().float()
    scale = expected.norm(dim=-1).mean()
    assert ((got - expected).norm(dim=-1) / (expected.norm(dim=-1) + scale)).max() <= bound


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_graph(kernel):
    """Inside a compiled block: no graph break, nothing compiled anew, the numbers of eager execution."""
    leaves, grad = tensors(2, 4, 2, 24, 8, torch.float32)

    def block(q, k, v):
        return attention_aten.causal(kernel, q * 2, k, v, None).transpose(1, 2).flatten(2)

    def gradients(function):
        out = function(*leaves)
        return out, *torch.autograd.grad(out, leaves, grad.transpose(1, 2).flatten(2))

    torch._dynamo.reset()
    with fused_on_cpu() as calls, torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            for a, b in zip(gradients(compiled), gradients(block), strict=True):
                torch.testing.assert_close(a, b)
    assert calls.counts == {kernel: 4, f"{kernel} backward": 4}


def on_cuda(size=64, dtype=torch.bfloat16):
    return torch.empty(1, 4, 256, size, dtype=dtype, device="meta")


def test_what_auto_is_on_cuda(monkeypatch):
    plain, windowed, one = AttentionMask(256, 256), AttentionMask(256, 256, window=9), AttentionMask(1, 256)

    class OnCuda:
        device, shape, dtype = torch.device("cuda", 0), (1, 4, 256, 64), torch.bfloat16

    class OfSmallHeads(OnCuda):
        shape = (1, 4, 256, 8)

    assert choose_backend(OnCuda, plain) == "sdpa"  # as torch prefers, where nothing was tried
    tried = CausalKernel("cudnn", 256)
    assert choose_backend(OnCuda, plain, kernel=tried) == "cudnn"
    assert choose_backend(OnCuda, AttentionMask(192, 192), kernel=tried) == "flash"  # cuDNN's faults go by length
    assert choose_backend(OnCuda, windowed, kernel=tried) == "flex"
    assert choose_backend(OfSmallHeads, windowed, kernel=tried) == "sdpa"
    assert choose_backend(OnCuda, one, kernel=tried) == "sdpa"
    assert choose_backend(OnCuda, plain, has_dropout=True, kernel=tried) == "math"
    assert choose_backend(OnCuda, AttentionMask(9, 9), kernel=CausalKernel("flex", 256)) == "efficient"
    assert choose_backend(OnCuda, AttentionMask(9, 9), kernel=CausalKernel("flash", 256)) == "flash"


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
def test_cuda_kernels_are_refused_elsewhere(backend):
    leaves, _ = tensors(1, 2, 2, 8, 8, torch.float32)
    with pytest.raises(UserError, match=f"'{backend}': this kernel is one of CUDA's"):
        attention(*leaves, backend=backend)


@pytest.mark.parametrize("kernel", KERNELS)
def test_refusals_that_need_no_device(kernel):
    fp32, odd = torch.empty(1, 2, 8, 64), torch.empty(1, 2, 8, 12, dtype=torch.bfloat16)
    assert "16 bits, not in float32" in attention_aten.refusal(kernel, fp32, fp32, fp32)
    assert "multiple of 8, not 12" in attention_aten.refusal(kernel, odd, odd, odd)


@pytest.mark.parametrize("kernel", KERNELS)
def test_refusals_are_torch_s_own(monkeypatch, kernel):
    """In its words; blocks of a ring, with more keys than queries, are not asked about as if they were causal."""
    asked = []

    def able(parameters, debug):
        asked.append((parameters.is_causal, parameters.enable_gqa, debug))
        if len(asked) == 3:
            warnings.warn("head_dim should be no more than 128 (Triggered internally at sdp_utils.cpp:1)", stacklevel=1)
        return len(asked) < 3

    monkeypatch.setattr(torch.backends.cuda, f"can_use_{kernel}_attention", able)
    q, k, more = (torch.empty(1, n, s, 64, dtype=torch.bfloat16) for n, s in ((4, 8), (2, 8), (4, 16)))
    assert attention_aten.refusal(kernel, q, k, k) == attention_aten.refusal(kernel, q, more, more) == ""
    assert attention_aten.refusal(kernel, q, k, k) == "head_dim should be no more than 128"
    assert asked == [(True, True, True), (False, False, True), (True, True, True)]
    enable = {"cudnn": torch.backends.cuda.enable_cudnn_sdp, "flash": torch.backends.cuda.enable_flash_sdp}[kernel]
    enable(False)
    try:
        assert "switched off" in attention_aten.refusal(kernel, q, k, k)
    finally:
        enable(True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["cudnn", "flash", "flex", "efficient", "sdpa"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "length", "size"),
    [(2, 4, 4, 256, 64), (2, 4, 2, 192, 64), (1, 8, 1, 320, 128), (3, 4, 2, 200, 32), (1, 2, 2, 77, 128)],
)
def test_kernels_on_a_gpu(backend, batch, heads, kv_heads, length, size):
    leaves, grad = tensors(batch, heads, kv_heads, length, size, torch.bfloat16, "cuda")
    if backend in KERNELS and attention_aten.refusal(backend, *leaves):
        pytest.skip(attention_aten.refusal(backend, *leaves))
    expected, gradients = by_math(leaves, grad)
    out = attention(*leaves, backend=backend)
    got = torch.autograd.grad(out.transpose(1, 2).flatten(2), leaves, grad.transpose(1, 2).flatten(2))
    for a, b in zip((out, *got), (expected, *gradients), strict=True):
        close(a, b, 0.0625)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("length", "kv_heads"), [(256, 4), (384, 2), (2048, 1)])
def test_blocks_on_a_gpu(kernel, length, kv_heads):
    leaves, grad = tensors(2, 4, kv_heads, length, 64, torch.bfloat16, "cuda")
    if attention_aten.refusal(kernel, *leaves):
        pytest.skip(attention_aten.refusal(kernel, *leaves))
    check_halves(kernel, leaves, grad, *by_math(leaves, grad), 0.0625)
