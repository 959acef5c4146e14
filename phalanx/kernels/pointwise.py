"""RMSNorm and SwiGLU's gate (arXiv 2002.05202) in few passes over memory, for eager execution.

torch's ``F.rms_norm`` is a composite on a CPU: forward and backward of 2,048 x 384 fp32 take about five times what its
fused ``layer_norm`` takes (docs/kernels.md). Here the forward is a norm and two products, and the backward takes both
of its sums from one product ``p = grad * x`` by matrix-vector products: the weight's gradient is ``r^T p`` and the
rows' inner products are ``p w``. On CUDA, ``torch.compile`` fuses the plain form as well.

Shapes: T rows, D hidden. RMSNorm: Zhang and Sennrich, arXiv 1910.07467.

SwiGLU's gate (arXiv 2002.05202): ``silu(gate) * up``, keeping nothing but its input.

Plain autograd keeps ``silu(gate)`` besides, a tensor as large as the MLP is wide: a seventh of all activations of a
Llama layer. Here backward takes it again, by the same operations on the same numbers, so gradients are the same bits.
On a CPU that pass costs more than the memory is worth, and ``torch.compile`` takes it again by itself.

Shapes: T tokens, F width of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _inverse_rms(x_TD: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps) of every row, (T, 1), in fp32."""
    norm: Tensor = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True)
    return norm.square_().div_(x_TD.shape[-1]).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        r = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight).to(dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, r = ctx.saved_tensors
        grad = grad.to(x.dtype)
        product = grad * x
        d_weight = torch.mv(product.t(), r.squeeze(1))
        inner = torch.mv(product, weight)[:, None].mul_(r).mul_(r).mul_(r).div_(-x.shape[-1])
        dx = torch.mul(grad, weight, out=product).mul_(r)
        return dx.addcmul_(x, inner), d_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension.

    Args:
        x: (..., D).
        weight: (D,).
        eps: added to the mean of squares.
        dtype: type of the result (default: that of ``x``).

    Returns:
        (..., D); no second derivatives where the fused form runs (fp32 and fp64 on a CPU, outside ``torch.compile``).
    """
    dtype = dtype or x.dtype
    fused = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling()
    if not fused:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(dtype)
    out: Tensor = _RMSNorm.apply(x.reshape(-1, x.shape[-1]), weight.to(x.dtype), eps, dtype)  # type: ignore[no-untyped-call]
    return out.view(x.shape)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor) -> Tensor:
        ctx.save_for_backward(inner)
        gate, up = inner.chunk(2, dim=1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inner,) = ctx.saved_tensors
        gate, up = inner.chunk(2, dim=1)
        d_inner = torch.empty_like(inner)
        d_gate, d_up = d_inner.chunk(2, dim=1)
        torch.mul(grad, F.silu(gate), out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return d_inner


def swiglu(inner_T2F: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows that hold gate and up beside each other: (T, 2F) -> (T, F).

    No second derivatives on a GPU outside ``torch.compile``.
    """
    if inner_T2F.device.type == "cpu" or torch.compiler.is_compiling():
        gate, up = inner_T2F.chunk(2, dim=1)
        return F.silu(gate) * up
    out: Tensor = _SwiGLU.apply(inner_T2F)  # type: ignore[no-untyped-call]
    return out
