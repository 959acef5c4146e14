"""Attention with its log-sum-exp from torch's private operators, on a CPU and on CUDA: used in this file alone.

*CPU: flash attention.* ``aten::_scaled_dot_product_flash_attention_for_cpu`` and its backward are what
``scaled_dot_product_attention`` runs on a CPU. Calling them directly lets a caller do the backward of many blocks into
one gradient, which autograd over slices cannot do without a full-size zero tensor per block.
``tests/kernels/test_flash_cpu.py`` says what they must do, and :func:`is_available` tells whether this torch has them:
where it does not, callers fall back to matrix products.

*CUDA: cuDNN's attention and FlashAttention 2.* ``scaled_dot_product_attention`` picks among these operators by rules
that differ from version to version, and cuDNN's is not right in every shape. Called by name the choice is ours: it
holds for a whole run, traces into one graph, and the log-sum-exp lets attention be put together from blocks of keys.
Schemas are those of torch 2.9 to 2.13; ``tests/kernels/test_fused_cuda.py`` holds torch to them.

Shapes: B batch, H query heads, G key/value heads (dividing H), S queries, K keys, E head size.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch
from torch import Tensor

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def is_available() -> bool:
    """Whether this torch has the private operators."""
    return hasattr(torch.ops.aten, _FORWARD) and hasattr(torch.ops.aten, _BACKWARD)


def cpu_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q (B, H, S, E), last dimension dense, to k and v (B, G, K, E), and the fp32 log-sum-exp (B, H, S).

    `bias` (B or 1, 1, S, K), of the queries' type, is 0 where seen, -inf elsewhere; every query must see a key.
    """
    out, lse = getattr(torch.ops.aten, _FORWARD)(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    return out, lse


def cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`cpu_forward` with respect to q, k and v, given its results."""
    dq, dk, dv = getattr(torch.ops.aten, _BACKWARD)(grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale)
    return dq, dk, dv


Fused = Literal["cudnn", "flash"]

_NAMES: dict[Fused, str] = {
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "flash": "_scaled_dot_product_flash_attention",
}


def refusal(kernel: Fused, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why torch does not run `kernel` on tensors like these on their CUDA device; empty where it does.

    More keys than queries are those of blocks, which see either all keys or, where there are as many, earlier ones.
    """
    if not hasattr(torch.ops.aten, _NAMES[kernel]) or not hasattr(torch.ops.aten, _NAMES[kernel] + "_backward"):
        return "this torch does not have it"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in 16 bits, not in {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] % 8:
        return f"it needs heads of a multiple of 8, not {q.shape[-1]}"
    cuda = torch.backends.cuda
    wanted, able = {
        "cudnn": (cuda.cudnn_sdp_enabled, cuda.can_use_cudnn_attention),
        "flash": (cuda.flash_sdp_enabled, cuda.can_use_flash_attention),
    }[kernel]
    if not wanted():  # type: ignore[no-untyped-call]
        return "it is switched off in torch.backends.cuda"
    is_causal = q.shape[2] == k.shape[2]  # torch knows no other
    parameters = cuda.SDPAParams(q, k, v, None, 0.0, is_causal, q.shape[1] != k.shape[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if able(parameters, True):
            return ""
    reasons = [str(warning.message).partition(" (Triggered")[0] for warning in caught]
    return "; ".join(reasons) or "torch does not run it here"


def causal(kernel: Fused, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention of as many queries as keys, (B, H, S, E); autograd goes through it."""
    out: Tensor = _call(kernel, q, k, v, True, scale)[0]
    return out


def cuda_forward(
    kernel: Fused, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """As :func:`cpu_forward`, of bf16 or fp16, without autograd; causal: query i sees keys 0 to i alone, and K is S."""
    out, lse = _call(kernel, q, k, v, is_causal, scale)[:2]
    return out, lse.reshape(q.shape[:3])  # cuDNN's is (B, H, S, 1)


def cuda_backward(
    kernel: Fused,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `out` and `lse` may be those over more keys than these, as of blocks put together."""
    # cuDNN keeps the plan that it made for the first backward of a shape, whose gradient and output then need the same
    # strides every time: so both are laid out in one way.
    grad, out, lse = grad.contiguous(), out.contiguous(), lse.contiguous()
    # Nothing is dropped: no seed is read, but there must be one.
    seed = torch.empty(2, dtype=torch.int64, device=q.device)
    lengths = (None, None, q.shape[2], k.shape[2])
    if kernel == "cudnn":
        back = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
        gradients = back(
            grad, q, k, v, out, lse[..., None], seed[0], seed[1], None, *lengths, 0.0, is_causal, scale=scale
        )
    else:
        back = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        gradients = back(
            grad, q, k, v, out, lse, *lengths, 0.0, is_causal, seed.view(torch.uint64), seed[0], scale=scale
        )
    dq, dk, dv = gradients
    return dq, dk, dv


def _call(kernel: Fused, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> Any:
    if kernel == "cudnn":
        operator = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        return operator(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    return operator(q, k, v, 0.0, is_causal, False, scale=scale)
