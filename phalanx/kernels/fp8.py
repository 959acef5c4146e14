"""Matrix products of linear layers in 8-bit floating point, one scale per tensor made anew each time.

The formats are those of arXiv 2209.05433: E4M3 (largest 448, three bits of mantissa) for inputs and weights, E5M2
(largest 57,344, two bits) for gradients of outputs, which span more binary orders than E4M3 has. That is also what
torchao and nanochat do with one scale per tensor. All three products of a linear layer are made so: outputs and input
gradients as bf16, weight gradients as fp32. Forward products let the tensor cores add in fewer bits
(``use_fast_accum``), gradients do not.

Scales are powers of two, the smallest that brings the tensor's largest magnitude within the format. Scaling then rounds
nothing: on a GPU and in the emulation of a CPU, the quantised values of a tensor are the same bits; and nothing is left
for a clamp to cut. (A compiler may fuse what makes the tensor, and round once where eager kernels round twice.) A
tensor that is not finite anywhere makes products that are finite nowhere, so that a check of gradients sees it. No
value is read back from the device.

A GPU's tensor cores (compute capability 8.9 or more) want both factors to run along the dimension that is summed over,
so a weight is held in both layouts (:class:`Fp8Weight`), made once for all products between two changes of it, while
inputs and gradients of outputs are transposed, in 8 bits, for the weight's gradient. A CPU multiplies the
same quantised values in fp32: slow, and the same numbers but for the order of sums.

Shapes: T tokens, I inputs, O outputs, each a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.linear import gradient_dtype

LEAST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that multiply in these formats (Ada; Hopper is 9.0)."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# The largest value of either format is 1.75 times this power of two.
_TOP_EXPONENT = {E4M3: 8, E5M2: 15}
# Where a tensor has nothing but zeros, or nearly so: small, and two of them still multiply to a normal fp32.
_LEAST_SCALE = 2.0**-60
# Of fp32; the bits of infinity are all those of the exponent.
_ALL_BUT_SIGN, _INFINITY, _MANTISSA_BEYOND_175, _TWICE_BIAS = 0x7FFFFFFF, 0x7F800000, 0x1FFFFF, 254 << 23


class _Scaled(NamedTuple):
    """``values * scale`` is the tensor, rounded to the format of `values`.

    The scale is fp32 of no dimensions, on the device: a power of two, or infinite where the tensor was not finite.
    """

    values: Tensor
    scale: Tensor


def twin(like: Tensor) -> ModuleType | None:
    """The Triton kernels, where tensors like this one are on a GPU and Triton is there."""
    if like.device.type != "cuda":
        return None
    try:
        from phalanx.kernels import fp8_triton
    except ImportError:
        return None
    return fp8_triton


def quantise(x: Tensor, dtype: torch.dtype) -> _Scaled:
    """`x` (float32 or bf16) in `dtype` (`E4M3` or `E5M2`), with the least power of two as scale that lets it fit.

    The values are row-major, however `x` lies.
    """
    scale, inverse = _scales(torch.linalg.vector_norm(x.detach(), float("inf")), dtype)
    return _Scaled((x.detach() * inverse).to(dtype, memory_format=torch.contiguous_format), scale)


def _scales(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales of tensors with these largest magnitudes, and their reciprocals, fp32."""
    # 2^e with largest <= 1.75 * 2^e, by the bits: adding carries into the exponent where the mantissa is beyond .75.
    # Infinity stays, and NaN, whose bits (sign and all) depend on the device, becomes infinity.
    bits = (largest.float().view(torch.int32) & _ALL_BUT_SIGN).clamp_max(_INFINITY)
    power = ((bits + _MANTISSA_BEYOND_175) & _INFINITY).view(torch.float32)
    scale = (power * 2.0 ** -_TOP_EXPONENT[dtype]).clamp_min(_LEAST_SCALE)
    # The reciprocal, exact on every device; of infinity 0, which makes NaN of what is not finite.
    return scale, (_TWICE_BIAS - scale.view(torch.int32)).clamp_min(0).view(torch.float32)


def quantise_weight(weight: Tensor) -> _Scaled:
    """`weight` in E4M3, by way of bf16: as those have it that gathered it from other ranks, who get no more of it."""
    return quantise(weight.bfloat16(), E4M3)


class Fp8Weight:
    """A weight in both layouts that products need, row-major, still to be filled (`requantise`); its memory stays."""

    def __init__(self, weight: Tensor) -> None:
        # As the weight is stored.
        self.stored = torch.empty_like(weight, dtype=E4M3, memory_format=torch.contiguous_format)
        # Its transpose.
        self.transposed = torch.empty_like(weight.t(), dtype=E4M3, memory_format=torch.contiguous_format)
        self.scale = torch.empty((), dtype=torch.float32, device=weight.device)  # of both


@torch.no_grad()
def requantise(weights: Sequence[tuple[Tensor, Fp8Weight]]) -> None:
    """Quantise weights that an optimizer has changed, as `quantise_weight` does; all scales in a few launches."""
    if not weights:
        return
    largest = torch.stack(torch._foreach_norm([weight for weight, _ in weights], float("inf")))
    scales, inverses = _scales(largest.bfloat16(), E4M3)
    torch._foreach_copy_([held.scale for _, held in weights], scales.unbind())
    kernels = twin(largest)
    for (weight, held), inverse in zip(weights, inverses.unbind(), strict=True):
        if kernels is not None and weight.stride(1) == 1:
            kernels.quantise_weight(weight, inverse, held.stored, held.transposed)
            continue
        held.stored.copy_(weight.bfloat16() * inverse)
        held.transposed.copy_(held.stored.t())


def fp8_linear(
    x_TI: Tensor, weight: Tensor, quantised: Fp8Weight | None = None, *, inputs_first: bool = False
) -> Tensor:
    """``x @ weight.T``, or ``x @ weight`` of a weight stored as (I, O): (T, I) -> (T, O) in the type of `x`.

    `weight` gets the gradient, in fp32 where it or its gradient is kept so. Where it is not `quantised` beforehand,
    that is done in the forward and in the backward pass, and nothing of it is kept between them.
    """
    held = (None, None, None) if quantised is None else (quantised.stored, quantised.transposed, quantised.scale)
    out: Tensor = _Linear.apply(x_TI, weight, *held, inputs_first)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    """The three products of a linear layer; what is kept of the input is its quantised form."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        stored: Tensor | None,
        transposed: Tensor | None,
        scale: Tensor | None,
        inputs_first: bool,
    ) -> Tensor:
        x_TI = quantise(x, E4M3)
        ctx.save_for_backward(*x_TI, weight if stored is None else None, stored, transposed, scale)
        ctx.inputs_first, ctx.dtype, ctx.gradient_dtype = inputs_first, x.dtype, gradient_dtype(weight)
        return _product(x_TI, _factor(weight, stored, transposed, scale, inputs_first), x.dtype, fast=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, scale_x, weight, stored, transposed, scale = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        grad_TO = quantise(grad, E5M2)
        dx = dw = None
        if needs_dx:
            dx = _product(grad_TO, _factor(weight, stored, transposed, scale, not ctx.inputs_first), ctx.dtype)
        if needs_dw:
            x_IT, grad_OT = _transposed(_Scaled(values, scale_x)), _transposed(grad_TO)
            left, right = (x_IT, grad_OT) if ctx.inputs_first else (grad_OT, x_IT)
            dw = _product(left, right, ctx.gradient_dtype)
        return dx, dw, None, None, None, None


def _factor(
    weight: Tensor | None, stored: Tensor | None, transposed: Tensor | None, scale: Tensor | None, is_transposed: bool
) -> _Scaled:
    if stored is not None and transposed is not None and scale is not None:
        return _Scaled(transposed if is_transposed else stored, scale)
    assert weight is not None
    made = quantise_weight(weight)
    return _transposed(made) if is_transposed else made


@torch.library.custom_op("phalanx::transposed_8_bit", mutates_args=(), schema="(Tensor x) -> Tensor")
def transposed_8_bit(x_MN: Tensor) -> Tensor:
    """The transpose, row-major. An operator of its own: a compiler would write it byte by byte, with what makes `x`."""
    if (kernels := twin(x_MN)) is not None and x_MN.is_contiguous():
        made: Tensor = kernels.transposed(x_MN)
        return made
    return x_MN.t().clone(memory_format=torch.contiguous_format)


@transposed_8_bit.register_fake
def _(x_MN: Tensor) -> Tensor:
    return x_MN.new_empty(x_MN.shape[1], x_MN.shape[0])


def _transposed(scaled: _Scaled) -> _Scaled:
    values = scaled.values
    return _Scaled(values.t().contiguous() if values.device.type == "cpu" else transposed_8_bit(values), scaled.scale)


def _product(left_MK: _Scaled, right_NK: _Scaled, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """``left @ right.T``, (M, N), of row-major factors: the one layout that all GPUs with these formats multiply in."""
    left, right = left_MK.values, right_NK.values.t()
    if left.device.type == "cpu":
        return (torch.mm(left.float(), right.float()) * (left_MK.scale * right_NK.scale)).to(dtype)
    return torch._scaled_mm(
        left, right, scale_a=left_MK.scale, scale_b=right_NK.scale, out_dtype=dtype, use_fast_accum=fast
    )
