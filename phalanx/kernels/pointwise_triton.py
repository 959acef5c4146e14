"""The Triton twins of the gradients in `phalanx.kernels.pointwise`: each reads what it needs once and fills one tensor.

torch.compile makes the two halves of such a gradient as one `cat`, whose kernel computes both halves for every element
under a mask: on an H200 it took twice the time of reading and writing (docs/kernels.md).

This module needs Triton to be imported. Under ``TRITON_INTERPRET=1`` its kernels run on a CPU, which is how they are
tested where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024
_HEADS = 16


@triton.jit
def _swiglu_gradient(grad, inner, out, grad_stride, inner_stride, width, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < width
    d = tl.load(grad + row * grad_stride + column, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(inner + row * inner_stride + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(inner + row * inner_stride + width + column, mask=there, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    made = out + row * (2 * width) + column
    tl.store(made, (d * up * s * (1.0 + gate * (1.0 - s))).to(out.dtype.element_ty), mask=there)
    tl.store(made + width, (d * gate * s).to(out.dtype.element_ty), mask=there)


def swiglu_gradient(grad_TF: Tensor, inner_T2F: Tensor) -> Tensor:
    """See `phalanx.kernels.pointwise.swiglu_gradient`."""
    grad, inner = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_TF, inner_T2F))
    rows, width = grad.shape
    out = torch.empty(rows, 2 * width, dtype=inner.dtype, device=inner.device)
    if out.numel():
        _swiglu_gradient[(rows, triton.cdiv(width, _COLUMNS))](
            grad, inner, out, grad.stride(0), inner.stride(0), width, COLUMNS=_COLUMNS, num_warps=4
        )
    return out


@triton.jit
def _load_heads(
    start, row, head, heads, there, stride, columns, offset, HALF: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    inside = (there & (head >= 0) & (head < heads))[:, None]
    if MASKED:
        inside = inside & (columns < HALF)[None, :]
    at = row + head[:, None] * stride + columns[None, :] + offset
    return tl.load(start + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rotated_back(
    dq, dk, dv, cos, sin, out, length, heads, kv_heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, angle_batch, angle_token,
    HALF: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """All heads of one token, `HEADS` at a time: queries, keys, and values, which are copied."""
    token = tl.program_id(0).to(tl.int64)
    batch, place = token // length, token % length
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, COLUMNS)
    all_heads = heads + 2 * kv_heads
    there = head < all_heads
    key, value = head - heads, head - heads - kv_heads
    MASKED: tl.constexpr = HALF != COLUMNS
    q_row, k_row, v_row = (
        batch * q_batch + place * q_token, batch * k_batch + place * k_token, batch * v_batch + place * v_token,
    )  # fmt: skip
    first = _load_heads(dq, q_row, head, heads, there, q_head, columns, 0, HALF, MASKED)
    first += _load_heads(dk, k_row, key, kv_heads, there, k_head, columns, 0, HALF, MASKED)
    first += _load_heads(dv, v_row, value, kv_heads, there, v_head, columns, 0, HALF, MASKED)
    second = _load_heads(dq, q_row, head, heads, there, q_head, columns, HALF, HALF, MASKED)
    second += _load_heads(dk, k_row, key, kv_heads, there, k_head, columns, HALF, HALF, MASKED)
    second += _load_heads(dv, v_row, value, kv_heads, there, v_head, columns, HALF, HALF, MASKED)
    inside = columns < HALF
    angles = batch * angle_batch + place * angle_token + columns
    # As the forward used them, in the type of what it turned.
    c = tl.load(cos + angles, mask=inside, other=1.0).to(out.dtype.element_ty).to(tl.float32)
    s = tl.load(sin + angles, mask=inside, other=0.0).to(out.dtype.element_ty).to(tl.float32)
    turned = (value < 0)[:, None]
    c, s = tl.where(turned, c[None, :], 1.0), tl.where(turned, s[None, :], 0.0)
    made = out + (token * all_heads + head[:, None]) * (2 * HALF) + columns[None, :]
    stored = there[:, None] & inside[None, :]
    tl.store(made, (first * c + second * s).to(out.dtype.element_ty), mask=stored)
    tl.store(made + HALF, (second * c - first * s).to(out.dtype.element_ty), mask=stored)


def rotate_heads_gradient(dq_BSHE: Tensor, dk_BSKE: Tensor, dv_BSKE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `phalanx.kernels.pointwise.rotate_heads_gradient`."""
    grads = [x if x.stride(-1) == 1 else x.contiguous() for x in (dq_BSHE, dk_BSKE, dv_BSKE)]
    batch, length, heads, size = dq_BSHE.shape
    kv_heads, half = dk_BSKE.shape[2], size // 2
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(batch, length, heads + 2 * kv_heads, size, dtype=dq_BSHE.dtype, device=dq_BSHE.device)
    strides: list[Any] = [x.stride(dim) for x in grads for dim in range(3)]
    angle_strides = (cos.stride(0) if cos.dim() == 4 else 0, cos.stride(-3))
    if out.numel():
        _rotated_back[(batch * length, triton.cdiv(out.shape[2], _HEADS))](
            *grads, cos, sin, out, length, heads, kv_heads, *strides, *angle_strides,
            HALF=half, COLUMNS=triton.next_power_of_2(half), HEADS=_HEADS, num_warps=4,
        )  # fmt: skip
    return out
