"""What came of reading a place to restore from, and reading once what a data-parallel group needs.

The members of such a group want the same blocks: one of them reads each, and broadcasts it to the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from phalanx.checkpoint.format.dcp import Block, is_dtensor
from phalanx.checkpoint.restoring.compatibility import Differences, ReadItem
from phalanx.core import units
from phalanx.core.layout import Shard
from phalanx.core.peers import Copies

Kind = Literal["memory", "peer", "durable"]


class Rate(NamedTuple):
    """What came from one place: ``this host``, ``durable``, or a host and its network interface.

    Attributes:
        bytes: by all ranks together.
        seconds: of the rank that took longest.
        possible_bytes_per_s: of the interface; None where it is not known.
    """

    kind: Kind
    place: str
    bytes: int
    seconds: float
    possible_bytes_per_s: float | None = None

    @property
    def share(self) -> float | None:
        """Of the possible rate; None where that is not known."""
        if not self.possible_bytes_per_s or self.seconds <= 0:
            return None
        return self.bytes / self.seconds / self.possible_bytes_per_s

    def __str__(self) -> str:
        """``eth0 of host b: 1.20 GiB at 1.35 GB/s, 54 % of what is possible``."""
        rate = f" at {self.bytes / self.seconds / 1e9:.2f} GB/s" if self.seconds > 0 else ""
        share = "" if self.share is None else f", {self.share:.0%} of what is possible"
        return f"{self.place}: {units.size(self.bytes)}{rate}{share}"


class ReadFault(NamedTuple):
    """Why something cannot be used: on a host (empty: durable storage) the shard of a rank (-1: all of it)."""

    host: str
    holder: int
    cause: str


@dataclass
class ReadReport:
    """What came of reading, on one rank.

    Attributes:
        faults: where there are any, the targets may hold anything.
        rates: by place.
        notes: a line for each damage that nothing has to be refused for.
    """

    faults: list[ReadFault] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def extend(self, other: ReadReport) -> None:
        """And what came of reading that."""
        self.faults += other.faults
        self.notes += other.notes
        for rate in other.rates:
            self.add(rate)

    def add(self, rate: Rate) -> None:
        """Count what was read, after one another, in one place."""
        for number, known in enumerate(self.rates):
            if (known.kind, known.place) == (rate.kind, rate.place):
                added = known._replace(bytes=known.bytes + rate.bytes, seconds=known.seconds + rate.seconds)
                self.rates[number] = added
                return
        self.rates.append(rate)


@dataclass(frozen=True)
class Restored:
    """A state that was taken back; the same on all ranks, but for `differences.missing`.

    Attributes:
        state: what training had given besides tensors.
        source: ``memory`` where all came from keepers of the ranks' own hosts, ``peer`` where some came from another
            host's, ``durable`` where it came from durable storage.
        name: of the durable checkpoint; empty where it came from memory.
        seconds: in all, with looking and refusals.
        bytes_by_kind: what all ranks together took from each kind of source; with reading whole runs or archives,
            and nothing twice that was broadcast within a group.
        rates: by place.
        refusals: one line for each copy or checkpoint that was refused.
        differences: names on one side only.
    """

    step: int
    attempt: int
    state: Any
    source: Kind
    name: str = ""
    seconds: float = 0.0
    bytes_by_kind: Mapping[Kind, int] = field(default_factory=dict)
    rates: tuple[Rate, ...] = ()
    refusals: tuple[str, ...] = ()
    differences: Differences = field(default_factory=Differences)

    @property
    def only_in_memory(self) -> bool:
        """Whether it lies in the memory of hosts, and perhaps nowhere else."""
        return self.source != "durable"


def together(rates: Iterable[Rate]) -> tuple[Rate, ...]:
    """The rates of all ranks, by place."""
    found: dict[tuple[Kind, str], Rate] = {}
    for rate in rates:
        known = found.get((rate.kind, rate.place))
        if known is not None:
            rate = rate._replace(bytes=rate.bytes + known.bytes, seconds=max(rate.seconds, known.seconds))
        found[rate.kind, rate.place] = rate
    return tuple(found[key] for key in sorted(found))


BUCKET_BYTES = 64 << 20
_DIGEST_BYTES = 7  # what fits into a signed number of 64 bits


@dataclass(frozen=True)
class Sharing:
    """The tensors of which every member of the group `copies` wants the same block, and the device from which they can
    be broadcast."""

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
    plain = [name for name in blocks if name not in shards and not is_dtensor(tensors[name])]
    device = next((b.tensor.device for b in blocks.values() if b.tensor.device.type != "cpu"), torch.device("cpu"))
    own = [rank, _digest(blocks, unsplit + plain), _digest(blocks, unsplit)]
    rows: list[list[int]] = []
    for member in range(copies.size):
        value = torch.tensor(own, dtype=torch.int64, device=device)
        copies.broadcast(value, member)
        rows.append([int(number) for number in value.tolist()])
    alike = [len({row[place] for row in rows}) == 1 for place in (1, 2)]
    names = unsplit + plain if alike[0] else unsplit if alike[1] else []
    return Sharing(copies, tuple(row[0] for row in rows), frozenset(names), device)


def _digest(blocks: Mapping[str, Block], names: Iterable[str]) -> int:
    rows = []
    for name in names:
        tensor, shard = blocks[name].tensor, blocks[name].shard
        # Where members lay a tensor out differently, they would disagree about which are broadcast by bucket.
        kind = (str(tensor.dtype), tensor.device.type, tuple(tensor.stride()))
        rows.append((name, shard.shape, shard.offsets, shard.sizes, kind))
    return int.from_bytes(hashlib.sha256(repr(rows).encode()).digest()[:_DIGEST_BYTES])


def readers(wanted: Sequence[ReadItem], members: int, distance: Callable[[int, int], int]) -> list[int | None]:
    """Which member reads each of the parts that all want; None where each reads it from memory of its own host.

    Of the members nearest to a part (`distance` to its holder; 0 is memory of its host), the one with the least to read
    so far takes it; large parts are assigned first.
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
    """Broadcast every tensor from the member that read it; called by all members with the same list of member and
    tensor. Large tensors in order are sent as they are, others in a bucket of at most `BUCKET_BYTES`."""
    for member, group in groupby(sorted(read, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        loose: list[Tensor] = []
        for _, tensor in group:
            large = tensor.numel() * tensor.element_size() >= BUCKET_BYTES // 16
            if large and tensor.is_contiguous() and tensor.device == sharing.device:
                sharing.copies.broadcast(_bytes(tensor), member)
            else:
                loose.append(tensor)
        for bucket in _buckets(loose):
            _give_bucket(sharing, member, bucket)


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
