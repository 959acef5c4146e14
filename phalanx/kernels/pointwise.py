"""RMSNorm (arXiv 1910.07467) and SwiGLU's gate (arXiv 2002.05202) in few passes over memory, for eager execution.

torch's ``F.rms_norm`` is a composite on a CPU: forward and backward of 2,048 x 384 fp32 take about five times what its
fused ``layer_norm`` takes (docs/kernels.md). Here the forward is a norm and two products, and the backward takes both
of its sums from one product ``p = grad * x`` by matrix-vector products: the weight's gradient is ``r^T p`` and the
rows' inner products are ``p w``. On CUDA, ``torch.compile`` fuses the plain form as well.

SwiGLU's gate, ``silu(gate) * up``, keeps nothing but its input. Plain autograd keeps ``silu(gate)`` besides, a tensor
as large as the MLP is wide: a seventh of all activations of a Llama layer. Here backward takes it again, by the same
operations on the same numbers, so gradients are the same bits. On a CPU that pass costs more than the memory is worth,
and ``torch.compile`` takes it again by itself.

On a GPU two gradients that fill one tensor from several, that of the gate and that of rotated heads, are operators of
their own (`phalanx.kernels.pointwise_triton`), which the compiler leaves as they are.

Shapes: T rows, D hidden, F width of the MLP; B batch, S sequence, H heads, K heads of keys and values, E head size.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def twin(like: Tensor) -> ModuleType | None:
    """The Triton kernels, where tensors like this one are on a GPU and Triton is there."""
    if like.device.type != "cuda":
        return None
    try:
        from phalanx.kernels import pointwise_triton
    except ImportError:
        return None
    return pointwise_triton


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
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
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension, in `dtype` (default: that of ``x``).

    No second derivatives where the fused form runs (fp32 and fp64 on a CPU, outside ``torch.compile``).
    """
    dtype = dtype or x.dtype
    fused = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64) and not torch.compiler.is_compiling()
    if not fused:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(dtype)
    out: Tensor = _RMSNorm.apply(x.reshape(-1, x.shape[-1]), weight.to(x.dtype), eps, dtype)  # type: ignore[no-untyped-call]
    return out.view(x.shape)


@torch.library.custom_op("phalanx::swiglu_gradient", mutates_args=(), schema="(Tensor grad, Tensor inner) -> Tensor")
def swiglu_gradient(grad_TF: Tensor, inner_T2F: Tensor) -> Tensor:
    """The gradient (T, 2F), row-major, of ``silu(gate) * up`` by the rows that hold gate and up beside each other."""
    if (kernels := twin(inner_T2F)) is not None:
        made: Tensor = kernels.swiglu_gradient(grad_TF, inner_T2F)
        return made
    gate, up = inner_T2F.chunk(2, dim=1)
    d_inner = torch.empty_like(inner_T2F, memory_format=torch.contiguous_format)
    d_gate, d_up = d_inner.chunk(2, dim=1)
    torch.mul(grad_TF, F.silu(gate), out=d_up)
    d_gate.copy_(torch.ops.aten.silu_backward(grad_TF * up, gate))
    return d_inner


@swiglu_gradient.register_fake
def _(grad_TF: Tensor, inner_T2F: Tensor) -> Tensor:
    return torch.empty_like(inner_T2F, memory_format=torch.contiguous_format)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor) -> Tensor:
        ctx.save_for_backward(inner)
        gate, up = inner.chunk(2, dim=1)
        return F.silu(gate) * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inner,) = ctx.saved_tensors
        d_inner: Tensor = swiglu_gradient(grad, inner)
        return d_inner


def swiglu(inner_T2F: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows that hold gate and up beside each other: (T, 2F) -> (T, F).

    No second derivatives on a GPU.
    """
    if inner_T2F.device.type == "cpu":
        gate, up = inner_T2F.chunk(2, dim=1)
        return F.silu(gate) * up
    out: Tensor = _SwiGLU.apply(inner_T2F)  # type: ignore[no-untyped-call]
    return out


@torch.library.custom_op(
    "phalanx::rotate_heads_gradient",
    mutates_args=(),
    schema="(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor",
)
def rotate_heads_gradient(dq_BSHE: Tensor, dk_BSKE: Tensor, dv_BSKE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient (B, S, H + 2K, E), row-major, by stacked heads whose queries and keys were rotated.

    Args:
        cos, sin: (S, 1, E/2) or (B, S, 1, E/2), float32, as the forward had them.
    """
    if (kernels := twin(dq_BSHE)) is not None:
        made: Tensor = kernels.rotate_heads_gradient(dq_BSHE, dk_BSKE, dv_BSKE, cos, sin)
        return made
    heads, kv_heads = dq_BSHE.shape[2], dk_BSKE.shape[2]
    out = _empty_heads(dq_BSHE, dk_BSKE)
    # A rotation's transpose is the rotation by the opposite angle.
    rotated(dq_BSHE, cos, -sin, out[:, :, :heads])
    rotated(dk_BSKE, cos, -sin, out[:, :, heads : heads + kv_heads])
    out[:, :, heads + kv_heads :].copy_(dv_BSKE)
    return out


@rotate_heads_gradient.register_fake
def _(dq_BSHE: Tensor, dk_BSKE: Tensor, dv_BSKE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _empty_heads(dq_BSHE, dk_BSKE)


def _empty_heads(dq_BSHE: Tensor, dk_BSKE: Tensor) -> Tensor:
    batch, length, heads, size = dq_BSHE.shape
    return dq_BSHE.new_empty(batch, length, heads + 2 * dk_BSKE.shape[2], size)


def rotated(x_BSNE: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Turn each pair of `x` by its angle into `out`; two roundings per element in low precision."""
    half = x_BSNE.shape[-1] // 2
    first, second = x_BSNE[..., :half], x_BSNE[..., half:]
    cos, sin = cos.to(x_BSNE.dtype), sin.to(x_BSNE.dtype)
    torch.mul(x_BSNE, torch.cat([cos, cos], dim=-1), out=out)  # One long product: short rows cost more than elements.
    out[..., :half].addcmul_(second, sin, value=-1)
    out[..., half:].addcmul_(first, sin)
    return out
