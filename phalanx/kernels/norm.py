"""RMSNorm in few passes over memory, for eager execution.

torch's ``F.rms_norm`` is a composite on a CPU: forward and backward of 2,048 x 384 fp32 take about five times what its
fused ``layer_norm`` takes (docs/kernels.md). Here the forward is a norm and two products, and the backward takes both
of its sums from one product ``p = grad * x`` by matrix-vector products: the weight's gradient is ``r^T p`` and the
rows' inner products are ``p w``. On CUDA, ``torch.compile`` fuses the plain form as well.

Shapes: T rows, D hidden. RMSNorm: Zhang and Sennrich, arXiv 1910.07467.
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
