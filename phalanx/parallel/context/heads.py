"""All-to-all attention (DeepSpeed-Ulysses, arXiv 2309.14509): part of every sequence in exchange for all of some heads.

Before attention, rank r gets the heads ``[r H / C, (r + 1) H / C)`` of the whole sequence; afterwards the outputs
travel back. Attention itself is the ordinary one, with every mask and back end. The ranks must divide the heads.

Shapes: B batch, H heads here, S local positions, L positions of the whole sequence, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.parallel.group import Group


def to_heads(x_BHSE: Tensor, group: Group, order_L: Tensor) -> Tensor:
    """(B, H, S, E) of all heads here -> (B, H / C, L, E) of some heads, positions in their natural order.

    Args:
        order_L: for every position of the sequence, its place among the positions of all ranks one after the other.

    Raises:
        UserError: the ranks do not divide the heads.
    """
    if x_BHSE.shape[1] % group.size:
        raise UserError(
            f"all_to_all cannot share {x_BHSE.shape[1]} heads (on each tensor rank) among {group.size} ranks",
            cure="set parallel.context_method=ring, or a divisor of the key/value heads",
            field="parallel.context",
            value=group.size,
        )
    out: Tensor = _Exchange.apply(x_BHSE, group, order_L, True)  # type: ignore[no-untyped-call]
    return out


def to_positions(x_BHLE: Tensor, group: Group, order_L: Tensor) -> Tensor:
    """The way back: (B, H / C, L, E) -> (B, H, S, E)."""
    out: Tensor = _Exchange.apply(x_BHLE, group, order_L, False)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """Either direction; each is the other's transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, order: Tensor, gather: bool) -> Tensor:
        ctx.group, ctx.order, ctx.gather = group, order, gather
        return _gather(x, group, order) if gather else _scatter(x, group, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = _scatter if ctx.gather else _gather
        return back(grad, ctx.group, ctx.order), None, None, None


def _gather(x_BHSE: Tensor, group: Group, order: Tensor) -> Tensor:
    size = group.size
    batch, heads, positions, width = x_BHSE.shape
    parcels = x_BHSE.reshape(batch, size, heads // size, positions, width).movedim(1, 0).contiguous()  # j is for rank j
    got = torch.empty_like(parcels)
    group.all_to_all(got, parcels).wait()
    return got.movedim(0, 2).flatten(2, 3).index_select(2, order)


def _scatter(x_BHLE: Tensor, group: Group, order: Tensor) -> Tensor:
    placed = torch.empty_like(x_BHLE)
    placed[:, :, order] = x_BHLE
    batch, heads, positions, width = placed.shape
    shape = (batch, heads, group.size, positions // group.size, width)
    parcels = placed.view(shape).movedim(2, 0).contiguous()
    got = torch.empty_like(parcels)
    group.all_to_all(got, parcels).wait()
    return got.movedim(0, 1).flatten(1, 2)
