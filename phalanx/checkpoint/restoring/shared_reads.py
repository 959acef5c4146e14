"""Reading once what all members of a data-parallel group need, and giving it to the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.format.dcp import Block
from phalanx.checkpoint.restoring.fit import Part
from phalanx.core.layout import Shard
from phalanx.core.peers import Copies

BUCKET_BYTES = 64 << 20
_DIGEST_BYTES = 7  # what fits into a signed number of 64 bits


@dataclass(frozen=True)
class Sharing:
    """What the members of a group have in common.

    Attributes:
        copies: the group.
        ranks: of its members.
        names: of the tensors of which every member wants the same block.
        device: where what is given to the others has to be.
    """

    copies: Copies
    ranks: tuple[int, ...]
    names: frozenset[str]
    device: torch.device


def agree(
    copies: Copies,
    rank: int,
    tensors: Mapping[str, Tensor],
    blocks: Mapping[str, Block],
    shards: Mapping[str, Shard],
) -> Sharing:
    """Called by all members together: which tensors they want the same blocks of.

    These are the tensors that no axis of the group splits, those without a shard among them, where every member has
    them alike. Where the members differ in the latter (state of random number generators that only one has), only those
    with shards count; where they differ in these too, none.
    """
    unsplit = [name for name in blocks if name in shards and not set(shards[name].axes) & set(copies.axes)]
    plain = [name for name in blocks if name not in shards and not isinstance(tensors[name], DTensor)]
    device = next((b.tensor.device for b in blocks.values() if b.tensor.device.type != "cpu"), torch.device("cpu"))
    told = _exchange(copies, [rank, _digest(blocks, unsplit + plain), _digest(blocks, unsplit)], device)
    alike = [len({one[place] for one in told}) == 1 for place in (1, 2)]
    names = unsplit + plain if alike[0] else unsplit if alike[1] else []
    return Sharing(copies, tuple(one[0] for one in told), frozenset(names), device)


def readers(wanted: Sequence[Part], members: int, distance: Callable[[int, int], int]) -> list[int | None]:
    """Which member reads each of the parts that all want; None where each reads it from memory of its own host.

    Of the members nearest to a part, the one with the least to read so far takes it; large parts are given out first.

    Args:
        distance: of a member to a holder; 0 is memory of its host.
    """
    loads = [0] * members
    chosen: list[int | None] = [None] * len(wanted)
    for number in sorted(range(len(wanted)), key=lambda n: (-wanted[n].nbytes, n)):
        distances = [distance(member, wanted[number].block.holder) for member in range(members)]
        if any(distances):
            nearest = min(distances)
            _, reader = min((loads[m], m) for m in range(members) if distances[m] == nearest)
            loads[reader] += wanted[number].nbytes
            chosen[number] = reader
    return chosen


def give(sharing: Sharing, read: Iterable[tuple[int, Tensor]]) -> None:
    """Give every tensor from the member that read it to all others; called by all members with the same list.

    Tensors that are large and in order go from place to place; others by a bucket of at most `BUCKET_BYTES`.

    Args:
        read: member and tensor.
    """
    in_order = sorted(((member, _flat(tensor, sharing.device)) for member, tensor in read), key=lambda pair: pair[0])
    for member, group in groupby(in_order, key=lambda pair: pair[0]):
        loose: list[Tensor] = []
        for _, (tensor, direct) in group:
            if direct:
                sharing.copies.broadcast(tensor, member)
            else:
                loose.append(tensor)
        for bucket in _buckets(loose):
            _give_bucket(sharing, member, bucket)


def _flat(tensor: Tensor, device: torch.device) -> tuple[Tensor, bool]:
    """The bytes of a tensor and True where they can be sent as they are, else the tensor and False."""
    large = tensor.numel() * tensor.element_size() >= BUCKET_BYTES // 16
    if large and tensor.is_contiguous() and tensor.device == device:
        return _bytes(tensor), True
    return tensor, False


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    filled = 0
    for slab in (slab for tensor in tensors for slab in _slabs(tensor)):
        size_bytes = slab.numel() * slab.element_size()
        if bucket and filled + size_bytes > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(slab)
        filled += size_bytes
    if bucket:
        yield bucket


def _slabs(tensor: Tensor) -> Iterator[Tensor]:
    """Runs of rows of at most a bucket each; rows longer than that in turn."""
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes <= BUCKET_BYTES or tensor.dim() == 0:
        yield tensor
        return
    rows = BUCKET_BYTES * tensor.shape[0] // size_bytes
    if rows:
        for first in range(0, tensor.shape[0], rows):
            yield tensor[first : first + rows]
    else:
        for row in tensor.unbind():
            yield from _slabs(row)


def _give_bucket(sharing: Sharing, member: int, tensors: list[Tensor]) -> None:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=sharing.device)
    starts = [0, *accumulate(sizes)]
    places = [(bucket[start:end], tensor) for (start, end), tensor in zip(pairwise(starts), tensors, strict=True)]
    if sharing.copies.index == member:
        for place, tensor in places:
            place.copy_(_bytes(tensor.contiguous()))
    sharing.copies.broadcast(bucket, member)
    if sharing.copies.index != member:
        for place, tensor in places:
            # The bytes may lie where numbers of this dtype must not begin, so they are taken out first.
            tensor.copy_(place.clone().view(tensor.dtype).view(tensor.shape))


def _exchange(copies: Copies, own: list[int], device: torch.device) -> list[list[int]]:
    told = []
    for member in range(copies.size):
        value = torch.tensor(own, dtype=torch.int64, device=device)
        copies.broadcast(value, member)
        told.append([int(number) for number in value.tolist()])
    return told


def _digest(blocks: Mapping[str, Block], names: Iterable[str]) -> int:
    rows = [(n, blocks[n].shard.shape, blocks[n].shard.offsets, blocks[n].shard.sizes, _kind(blocks[n])) for n in names]
    return int.from_bytes(hashlib.sha256(repr(rows).encode()).digest()[:_DIGEST_BYTES])


def _kind(block: Block) -> tuple[str, str, tuple[int, ...]]:
    # Where members lay a tensor out differently, they would disagree about which go by bucket.
    return str(block.tensor.dtype), block.tensor.device.type, tuple(block.tensor.stride())
