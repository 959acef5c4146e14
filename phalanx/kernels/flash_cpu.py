"""torch's CPU flash attention with its log-sum-exp: two private aten operators, used in this file alone.

``aten::_scaled_dot_product_flash_attention_for_cpu`` and its backward are what ``scaled_dot_product_attention`` runs on
a CPU. Calling them directly lets a caller do the backward of many blocks into one gradient, which autograd over slices
cannot do without a full-size zero tensor per block. ``tests/kernels/test_flash_cpu.py`` says what they must do, and
:func:`is_available` tells whether this torch has them: where it does not, callers fall back to matrix products.

Shapes: B batch, H query heads, G key/value heads (dividing H), S queries, K keys, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def is_available() -> bool:
    """Whether this torch has the private operators."""
    return hasattr(torch.ops.aten, _FORWARD) and hasattr(torch.ops.aten, _BACKWARD)


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention with an additive bias.

    Args:
        q: (B, H, S, E), any strides with a dense last dimension.
        k: (B, G, K, E).
        v: (B, G, K, E).
        bias: (B or 1, 1, S, K), of the queries' type: 0 where seen, -inf elsewhere; every query must see a key.
        scale: factor of the scores.

    Returns:
        out (B, H, S, E), and the fp32 log-sum-exp of the scores (B, H, S).
    """
    out, lse = getattr(torch.ops.aten, _FORWARD)(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`forward` with respect to q, k and v, given its results."""
    dq, dk, dv = getattr(torch.ops.aten, _BACKWARD)(grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale)
    return dq, dk, dv
