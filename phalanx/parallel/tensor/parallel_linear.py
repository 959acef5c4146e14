"""Projections of a layer under tensor and sequence parallel: gather, then multiply; multiply, then scatter.

Between them activations are all T tokens by this rank's part of the heads or columns; outside, R = T / n rows of whole
width. The rows that an input projection gathered are not kept: backward gathers them again, while it makes the
gradient of the activations, so that nothing of a layer is kept n times (arXiv 2205.05198, section 4.2.2). Biases of
output projections are added once, to the scattered rows; theirs and the norms' gradients are therefore partial.

Weight gradients that are put off (`phalanx.parallel.deferred_gradients`) communicate nothing when they are made: what
they need was gathered in the backward pass, so a schedule may make them in any order.

Shapes: T tokens of the sequences, R rows of the stream on this rank, D hidden, N rows of a local weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.group import Group
from phalanx.parallel.tensor.overlap import Overlap, Pending


@dataclass(frozen=True)
class Spread:
    """What the layers of a part share: how they communicate, in what type they compute, where weights' work may go."""

    overlap: Overlap
    compute: torch.dtype
    queue: WeightQueue | None = None


def local_rows(tokens: int, group: Group) -> slice:
    """This rank's rows of the stream of `tokens` tokens (B * S, of the local part of the sequences).

    Raises:
        UserError: the ranks cannot have equally many.
    """
    if tokens % group.size:
        raise UserError(
            f"does not divide the {tokens} tokens of a micro-batch, whose rows the ranks share",
            cure=f"make micro-batch times sequence length a multiple of {group.size}",
            field="parallel.tensor",
            value=group.size,
        )
    rows = tokens // group.size
    return slice(group.index * rows, (group.index + 1) * rows)


def gather_products(
    spread: Spread, x_RD: Tensor, weights_ND: Sequence[nn.Parameter], biases: Sequence[nn.Parameter | None]
) -> tuple[Tensor, ...]:
    """Rows of the stream (in the compute type), gathered, by each weight: (R, D) -> (T, N) each.

    Weights are stored as (outputs, inputs); a bias is for the first rows of its weight.
    """
    out: tuple[Tensor, ...] = _GatherProducts.apply(spread, len(weights_ND), x_RD, *weights_ND, *biases)  # type: ignore[no-untyped-call]
    return out


def products_scatter(spread: Spread, inputs_TN: Sequence[Tensor], weights_ND: Sequence[nn.Parameter]) -> Tensor:
    """The sum over ranks and inputs of input by weight, at the rows of this rank: (T, N) each -> (R, D).

    Weights are stored as (inputs, outputs).
    """
    out: Tensor = _ProductsScatter.apply(spread, len(weights_ND), *inputs_TN, *weights_ND)  # type: ignore[no-untyped-call]
    return out


class _GatherProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spread: Spread, count: int, x: Tensor, *stored: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = stored[:count], stored[count:]
        ctx.spread, ctx.weights, ctx.biases = spread, weights, biases
        ctx.save_for_backward(x)
        matrices = [w.to(spread.compute).t() for w in weights if w is not None]
        padded = [_padded(b, m.shape[1], spread.compute) for b, m in zip(biases, matrices, strict=True)]
        return tuple(spread.overlap.gather_products(x, matrices, padded)[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        spread: Spread = ctx.spread
        count = len(ctx.weights)
        needs_x, needs_weights = ctx.needs_input_grad[2], ctx.needs_input_grad[3 : 3 + count]
        grads = tuple(grad.contiguous() for grad in grads)
        gathered = spread.overlap.gather(x) if any(needs_weights) else None
        dx: Pending | None = None
        if needs_x:
            dx = spread.overlap.products_scatter(grads, [w.to(spread.compute) for w in ctx.weights])
        d_weights: list[Tensor | None] = [None] * count
        if gathered is not None:
            d_weights = _weight_gradients(spread, ctx.weights, needs_weights, grads, [gathered.wait()] * count)
        d_biases = [None if b is None else g.sum(0)[: len(b)].to(b) for g, b in zip(grads, ctx.biases, strict=True)]
        return None, None, None if dx is None else dx.wait(), *d_weights, *d_biases


class _ProductsScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spread: Spread, count: int, *tensors: Tensor) -> Tensor:
        inputs, weights = tensors[:count], tensors[count:]
        ctx.spread, ctx.weights = spread, weights
        ctx.save_for_backward(*inputs)
        return spread.overlap.products_scatter(inputs, [w.to(spread.compute) for w in weights]).wait()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        spread: Spread = ctx.spread
        count = len(ctx.weights)
        matrices = [w.to(spread.compute).t() for w in ctx.weights]
        gathered, d_inputs = spread.overlap.gather_products(grad.contiguous(), matrices, [None] * count)
        needs_weights = ctx.needs_input_grad[2 + count :]
        d_weights = _weight_gradients(spread, ctx.weights, needs_weights, ctx.saved_tensors, [gathered] * count)
        return None, None, *d_inputs, *d_weights


def _weight_gradients(
    spread: Spread, weights: Sequence[Tensor], needed: Sequence[bool], left: Sequence[Tensor], right: Sequence[Tensor]
) -> list[Tensor | None]:
    gradients: list[Tensor | None] = []
    for weight, need, a, b in zip(weights, needed, left, right, strict=True):
        if need and spread.queue is not None and spread.queue.deferring:
            spread.queue.put(weight, partial(torch.mm, a.t(), b))
            need = False
        gradients.append(torch.mm(a.t(), b).to(weight.dtype) if need else None)
    return gradients


def _padded(bias: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor | None:
    """A bias as long as the stack of outputs, of which only the first may have one."""
    if bias is None:
        return None
    return F.pad(bias.to(dtype), (0, rows - len(bias)))
