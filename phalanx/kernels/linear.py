"""Matrix products of linear layers, in the faster of torch's two CPU libraries, and the fast precision of a machine.

``torch.mm`` of fp32 goes to MKL. For the flat products of linear layers oneDNN, which torch has on board as well,
takes 7 to 20 % less time on an AMD Zen 4, on one thread as on two (docs/benchmarks/train_cpu.md). torch
reaches it through one private operator, ``mkldnn::_linear_pointwise``, used in this file alone;
``tests/kernels/test_linear.py`` says what it must do, and :func:`is_available` tells whether this torch has it. Weight
gradients stay with ``torch.mm``, which is the faster one for them; and everything else (bf16, whose ``torch.mm`` is
oneDNN already, CUDA, float64, tracing by ``torch.compile``) runs torch's own operators.

The choice depends on shapes and types alone, so that a resumed run repeats the same arithmetic: oneDNN from 4 million
multiplications (at 1 million MKL is 1.2 times as fast), but MKL where a residual is added to a product of fewer than
256 inputs (128 inputs: 0 to 10 % faster on one thread, 5 to 20 % on two; from 256 on oneDNN is, by 4 to 17 %).

Products of 16-bit activations take weights that are masters in fp32, by a cast of them that may have been made
beforehand, once for all micro-batches of a step; their gradients are fp32, which on CUDA the product itself writes.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.core.host import cpu_line


def cpu_has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware; without, torch may take hundreds of times as long as in fp32."""
    # What torch uses, not what the CPU has: ATEN_CPU_CAPABILITY may hold torch back.
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    flags = cpu_line("flags").split()
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16"))


# Where oneDNN begins to win: see above.
_LEAST_MULTIPLICATIONS = 1 << 22
_LEAST_INPUTS_WITH_RESIDUAL = 256


def is_available() -> bool:
    """Whether this torch has oneDNN, and the private operator to reach it by."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_onednn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def operators() -> tuple[Any, ...]:
    """The private operators, for what must know matrix products by name (selective recompute); none where absent."""
    if not is_available():
        return ()
    return torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary


def _product(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """``x @ weight.T`` by oneDNN; a weight stored as (I, O) is given as its transposed view."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, None, "none", [], "")
    return out


def _product_plus(x_TI: Tensor, weight_OI: Tensor, residual_TO: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x_TI, residual_TO, weight_OI, None, "add")
    return out


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, residual: Tensor | None, inputs_first: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.inputs_first = inputs_first
        weight_OI = weight.t() if inputs_first else weight
        if residual is None:
            return _product(x, weight_OI)
        if x.shape[1] < _LEAST_INPUTS_WITH_RESIDUAL:
            return torch.addmm(residual, x, weight_OI.t())
        return _product_plus(x, weight_OI, residual)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_residual, _ = ctx.needs_input_grad
        # A gradient may be an expanded view, as that of a sum is; up to two products read it.
        grad = grad.contiguous()
        dx = _product(grad, weight if ctx.inputs_first else weight.t()) if needs_dx else None
        dw = None
        if needs_dw:
            # The product is laid out as the weight is stored, so that its gradient needs no transposed copy.
            left, right = (x, grad) if ctx.inputs_first else (grad, x)
            dw = torch.mm(left.t(), right)
        return dx, dw, grad if needs_residual else None, None


class _CastProject(torch.autograd.Function):
    """``x @ cast.T`` (+ what is added), or ``x @ cast`` of a weight stored as (I, O), in 16 bits; `cast` is `weight`.

    The gradient goes to `weight`, in fp32 where it or its gradient is kept so.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cast: Tensor, added: Tensor | None, inputs_first: bool) -> Tensor:
        # The cast, not the weight: half the bytes, and backward multiplies by what forward did.
        ctx.save_for_backward(x, cast)
        ctx.inputs_first, ctx.sums_rows = inputs_first, added is not None and added.dim() == 1
        ctx.is_wide = gradient_dtype(weight) == torch.float32
        cast_IO = cast if inputs_first else cast.t()
        return torch.mm(x, cast_IO) if added is None else torch.addmm(added, x, cast_IO)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, cast = ctx.saved_tensors
        needs_dx, needs_dw, _, needs_added, _ = ctx.needs_input_grad
        dx = torch.mm(grad, cast.t() if ctx.inputs_first else cast) if needs_dx else None
        dw = d_added = None
        if needs_dw:
            left, right = (x, grad) if ctx.inputs_first else (grad, x)
            dw = add_product(None, left.t(), right) if ctx.is_wide else torch.mm(left.t(), right)
        if needs_added:
            # The gradient of a bias sums over tokens; that of a residual passes through.
            d_added = grad.sum(0) if ctx.sums_rows else grad
        return dx, dw, None, d_added, None


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """fp32 where a weight or its gradient is kept so, else the type of the weight.

    The compiler knows nothing of a leaf's `grad_dtype`, and rounds its gradients to the type of the weight.
    """
    kept = None if torch.compiler.is_compiling() else weight.grad_dtype
    return torch.float32 if torch.float32 in (weight.dtype, kept) else weight.dtype


def _in_16_bits(x: Tensor, weight: Tensor, cast: Tensor | None, added: Tensor | None, inputs_first: bool) -> Tensor:
    # Detached: the gradient goes to the weight by hand, not through this cast.
    if cast is None:
        cast = weight.detach().to(x.dtype)
    out: Tensor = _CastProject.apply(x, weight, cast, added, inputs_first)  # type: ignore[no-untyped-call]
    return out


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.shape[0] * weight.numel() >= _LEAST_MULTIPLICATIONS
        and not torch.compiler.is_compiling()
        and is_available()
    )


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, cast_OI: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, as ``torch.nn.functional.linear``: (T, I) -> (T, O).

    No second derivatives in 16 bits, nor where oneDNN runs (fp32 on a CPU, without a bias).

    Args:
        weight_OI: in the type of ``x``, or wider; the bias is in the type of ``x``.
        cast_OI: the weight in the type of ``x`` where that was made beforehand; gradients are the weight's still.
    """
    if x_TI.element_size() == 2:
        return _in_16_bits(x_TI, weight_OI, cast_OI, bias_O, False)
    if bias_O is not None or not _by_onednn(x_TI, weight_OI):
        return F.linear(x_TI, weight_OI.to(x_TI.dtype), bias_O)
    out: Tensor = _Project.apply(x_TI, weight_OI, None, False)  # type: ignore[no-untyped-call]
    return out


def project(x_TI: Tensor, weight_IO: Tensor, added: Tensor | None = None, *, cast_IO: Tensor | None = None) -> Tensor:
    """``x @ weight``, plus what is `added`, in one kernel: (T, I) -> (T, O); else as :func:`linear`.

    Args:
        added: a residual (T, O) or a bias (O,), in the type of ``x``.
    """
    if x_TI.element_size() == 2:
        return _in_16_bits(x_TI, weight_IO, cast_IO, added, True)
    is_bias = added is not None and added.dim() == 1
    if is_bias or not _by_onednn(x_TI, weight_IO):
        weight_IO = weight_IO.to(x_TI.dtype)
        return torch.mm(x_TI, weight_IO) if added is None else torch.addmm(added, x_TI, weight_IO)
    out: Tensor = _Project.apply(x_TI, weight_IO, added, True)  # type: ignore[no-untyped-call]
    return out


def add_product(sum_IO: Tensor | None, left_IT: Tensor, right_TO: Tensor) -> Tensor:
    """``sum + left @ right`` in fp32, in the memory of the sum; None: of nothing yet.

    On CUDA the product of 16-bit factors adds to the sum itself, in one kernel; a CPU has none that does.
    """
    is_16_bit = left_IT.element_size() == 2
    if left_IT.device.type == "cuda" and is_16_bit:
        if sum_IO is None:
            return torch.mm(left_IT, right_TO, out_dtype=torch.float32)
        if torch.compiler.is_compiling():  # its addmm rounds the sum to 16 bits (pytorch #163880)
            return sum_IO.add_(torch.mm(left_IT, right_TO, out_dtype=torch.float32))
        return torch.addmm(sum_IO, left_IT, right_TO, out_dtype=torch.float32, out=sum_IO)
    part_IO = torch.mm(left_IT, right_TO).float()
    return part_IO if sum_IO is None else sum_IO.add_(part_IO)
