"""SwiGLU's gate (arXiv 2002.05202): ``silu(gate) * up``, keeping nothing but its input.

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
