"""What this process holds of each logical tensor: some memory, and which block of the tensor it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.core.layout import Shard


@dataclass(frozen=True)
class Block:
    """Memory of shape ``shard.sizes`` that holds the block `shard` of a logical tensor."""

    tensor: Tensor
    shard: Shard


def held(tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Block]:
    """The blocks of `tensors`: those in `shards` as said there, DTensors as they say themselves, others whole.

    Raises:
        ValueError: a shard does not have the size of its tensor.
    """
    return {name: _block(name, tensor.detach(), shards.get(name)) for name, tensor in tensors.items()}


def _block(name: str, tensor: Tensor, shard: Shard | None) -> Block:
    if shard is None and isinstance(tensor, DTensor):
        [box] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return Block(tensor.to_local(), Shard(tuple(tensor.shape), tuple(box.offsets), tuple(box.sizes)))
    if shard is None:
        return Block(tensor, Shard.whole(tuple(tensor.shape)))
    if tuple(tensor.shape) != shard.sizes:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} in memory, but its shard has {shard.sizes}")
    return Block(tensor, shard)
