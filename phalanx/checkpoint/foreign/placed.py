"""Which block of a DTensor this rank holds, and whether it is the one that writes it."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.core.errors import UserError
from phalanx.core.layout import Axis
from phalanx.core.shard import Shard


def placed(name: str, tensor: Tensor) -> tuple[Tensor, Shard | None]:
    """The memory of a tensor on this rank, and what block of the whole it is; None for a tensor that is no DTensor.

    Raises:
        UserError: it holds sums that are not complete, or its mesh has this rank not among its ranks.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in tensor.placements):
        problem = "is a DTensor of which this rank has no block" if coordinate is None else "holds partial sums"
        raise UserError(problem, cure="redistribute it before it is saved", field=name)
    local = tensor.to_local().detach()
    boxes = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    offsets = tuple(boxes[0].offsets) if boxes and local.numel() else (0,) * tensor.dim()
    pairs = zip(coordinate, tensor.placements, strict=True)
    owner = all(place == 0 for place, placement in pairs if placement.is_replicate())
    axes: tuple[Axis, ...] = () if tuple(local.shape) == tuple(tensor.shape) else ("shard",)
    return local, Shard(tuple(tensor.shape), offsets, tuple(local.shape), axes, owner)
