"""Sums over logical parameters that are spread over ranks: for the optimizers, and for the norm of the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.core.layout import AXES, Axis
from phalanx.core.shard import Shard
from phalanx.optim.base import Reduction, local
from phalanx.parallel.group import Groups

_Kind = tuple[tuple[Axis, ...], torch.dtype]


class ShardReduction:
    """The `Reduction` of a sharded layout: one collective for all sums over the same axes.

    Ranks that hold different rows of a parameter call alike, with sums of zero where they hold none.

    Args:
        groups: of this rank.
        shards: what part of its logical parameter each parameter is; a run of rows.
    """

    def __init__(self, groups: Groups, shards: Mapping[Tensor, Shard]) -> None:
        self._groups = groups
        self._axes = {parameter: _spread(groups, shard) for parameter, shard in shards.items()}

    def __call__(self, sums: list[Tensor], parameters: Sequence[Tensor], dim: int | None) -> list[Tensor]:
        """As `phalanx.optim.base.Reduction`; sums over columns are complete, since only rows are split."""
        if dim == -1:
            return sums
        packs: dict[_Kind, list[int]] = {}
        for index, (value, parameter) in enumerate(zip(sums, parameters, strict=True)):
            packs.setdefault((self._axes[parameter], value.dtype), []).append(index)
        complete = list(sums)
        for (axes, _), indices in packs.items():
            if axes:
                for index, value in zip(indices, self._total(axes, [sums[i] for i in indices]), strict=True):
                    complete[index] = value
        return complete

    def _total(self, axes: tuple[Axis, ...], sums: list[Tensor]) -> list[Tensor]:
        packed = torch.cat([value.reshape(-1) for value in sums])
        self._groups.group(*axes).all_reduce(packed).wait()
        pieces = torch.split(packed, [value.numel() for value in sums])
        return [piece.view(value.shape) for piece, value in zip(pieces, sums, strict=True)]


def reduction_over(groups: Groups, shards: Mapping[Tensor, Shard]) -> Reduction:
    """The reduction that the optimizers of parts need; the local one, which may be compiled, where nothing is split."""
    return ShardReduction(groups, shards) if any(_spread(groups, s) for s in shards.values()) else local


class GradientNorm:
    """The norm of the whole gradient, of which every element counts once: that of the rank that owns it.

    All ranks call it, and all get the same bits, so that they clip and judge alike.

    Args:
        groups: of this rank.
        shards: what part of its logical parameter each parameter is, and whether it is owned here.
    """

    def __init__(self, groups: Groups, shards: Mapping[Tensor, Shard]) -> None:
        self._groups = groups
        self._owner = {parameter: shard.owner for parameter, shard in shards.items()}

    @torch.no_grad()
    def __call__(self, parameters: Iterable[Tensor]) -> Tensor:
        """The 2-norm of the gradients of `parameters` of all ranks, float32; squares are added up in float64."""
        held = list(parameters)
        gradients = [p.grad for p in held if p.grad is not None and self._owner[p] and p.grad.numel()]
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
            total = norms.double().square().sum()
        else:
            total = torch.zeros((), dtype=torch.float64, device=held[0].device if held else None)
        if used := tuple(axis for axis in AXES if self._groups.layout.size(axis) > 1):
            self._groups.group(*used).all_reduce(total).wait()
        return total.sqrt().float()


def _spread(groups: Groups, shard: Shard) -> tuple[Axis, ...]:
    """The axes to add over, in the order that names their group."""
    return tuple(axis for axis in AXES if axis in shard.axes and groups.layout.size(axis) > 1)
