"""The memory of a tensor on this rank: which block of a whole it is, whether it can be saved, and how it is written."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.core.errors import UserError
from phalanx.core.layout import Axis, Shard


def placed(name: str, tensor: Tensor) -> tuple[Tensor, Shard | None]:
    """The memory of a tensor on this rank, and what block of the whole it is; None for a tensor that is no DTensor.

    Raises:
        UserError: it cannot be saved; it holds sums that are not complete, or its mesh has this rank not among its
            ranks.
    """
    require_savable(name, tensor)
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


def require_savable(name: str, tensor: Tensor) -> None:
    """Raises UserError for a tensor that is no plain block of memory with values, or whose name no file can hold."""
    problem, cure = "", "keep plain tensors instead, or leave it out (register_buffer(…, persistent=False))"
    if tensor.is_meta:
        problem = "is on the meta device, where there are no values"
        cure = "give the model memory (to_empty) and values before the Checkpointer is made"
    elif tensor.is_quantized:
        problem = "is a quantized tensor, which a checkpoint cannot hold"
    elif tensor.is_nested:
        problem = "is a nested tensor, which a checkpoint cannot hold"
    elif tensor.layout != torch.strided:
        problem = f"is a sparse tensor ({tensor.layout}), which a checkpoint cannot hold"
    printable = name.encode(errors="backslashreplace").decode()
    if printable != name:
        problem, cure = "has half a character (a lone surrogate) in its name, which no file can hold", "rename it"
    if problem:
        raise UserError(problem, cure=cure, field=printable)


def is_indirect(tensor: Tensor) -> bool:
    """Whether bytes cannot be read into it: elements share memory (``expand``), or are conjugated or negated on use."""
    return not isinstance(tensor, DTensor) and (bool(_expanded(tensor)) or tensor.is_conj() or tensor.is_neg())


def overwrite(name: str, tensor: Tensor, saved: Tensor) -> None:
    """Give `tensor`, which may be indirect, the values of `saved`; through the memory that its elements share.

    Raises:
        UserError: elements that share memory have different values in `saved`; nothing is changed then.
    """
    own, new = tensor.detach(), saved
    for dim in _expanded(tensor):
        own, new = own.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
    if own.shape != saved.shape and not _same_bytes(new.expand_as(saved), saved):
        problem = (
            "is expanded here, so that its elements share memory, and they have different values in the checkpoint"
        )
        raise UserError(problem, cure="make it a tensor of its own (contiguous())", field=name)
    own.copy_(new)


def _expanded(tensor: Tensor) -> list[int]:
    return [dim for dim, size in enumerate(tensor.shape) if size > 1 and tensor.stride(dim) == 0]


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (one, other)))
