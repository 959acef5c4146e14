"""Copies of state that ranks should hold alike, compared by digests: by one small all-gather where all is well.

Ranks that differ only along axes over which a tensor is not split hold the same part of it: replicas of data-parallel
groups all state that they update, tensor-parallel ranks the norms. After the reduction their gradients are equal, and
they make the same update of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.core.layout import AXES, Axis, Layout, Shard
from phalanx.parallel.digests import together
from phalanx.parallel.group import Groups


def copy_axes(layout: Layout, shard: Shard) -> tuple[Axis, ...]:
    """The axes along which other ranks hold the same part; stages of a pipeline hold other tensors."""
    return tuple(axis for axis in AXES if axis not in (*shard.axes, "pipeline") and layout.size(axis) > 1)


@torch.no_grad()
def unlike_copies(
    groups: Groups, digests: Tensor, axes: Sequence[tuple[Axis, ...]]
) -> dict[int, dict[int, tuple[int, int]]]:
    """Which tensors' copies differ, by index: the digest of each rank that holds one. Waits for the device.

    Args:
        digests: (tensors, 2) int64, as `phalanx.parallel.digests.digests_of` makes them; all ranks of a stage call this
            with the same tensors, in one order.
        axes: of each, as `copy_axes` says; empty where this rank holds the only copy.
    """
    by_axes: dict[tuple[Axis, ...], list[int]] = {}
    for index, along in enumerate(axes):
        if along:
            by_axes.setdefault(along, []).append(index)
    first = {along: _gathered(groups, along, together(digests[by_axes[along]])) for along in sorted(by_axes)}
    if not first:
        return {}
    differ = torch.stack([(copies != copies[0]).any() for copies in first.values()]).tolist()
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for along in [along for along, does in zip(first, differ, strict=True) if does]:
        ranks = groups.group(*along).ranks
        copies = _gathered(groups, along, digests[by_axes[along]]).tolist()
        for place, index in enumerate(by_axes[along]):
            mine = {rank: (of[place][0], of[place][1]) for rank, of in zip(ranks, copies, strict=True)}
            if len(set(mine.values())) > 1:
                found[index] = mine
    return found


def _gathered(groups: Groups, along: tuple[Axis, ...], values: Tensor) -> Tensor:
    """(members, …) of what each member of the group along these axes has."""
    group = groups.group(*along)
    out = values.new_empty((group.size * len(values), *values.shape[1:]))
    group.all_gather(out, values.contiguous()).wait()
    return out.view(group.size, *values.shape)
