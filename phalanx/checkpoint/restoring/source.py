"""What any place to restore from offers, what came of reading it, and reading once what a group needs.

The members of a data-parallel group want the same blocks: one of them reads each, and gives it to the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.format.dcp import Block
from phalanx.checkpoint.format.shard_plan import Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper_contract import Endpoint
from phalanx.checkpoint.restoring.compatibility import Differences, Part, SavedBlocks
from phalanx.core import units
from phalanx.core.layout import Shard
from phalanx.core.peers import Copies

Kind = Literal["memory", "peer", "durable"]


class Rate(NamedTuple):
    """What came over one network interface of another host, or from one other place.

    Attributes:
        place: ``this host``, ``durable``, or a host and its interface.
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


class Fault(NamedTuple):
    """Why something cannot be used.

    Attributes:
        host: that has the copy; empty: durable storage.
        holder: rank of the shard; -1: everything of that host or checkpoint.
    """

    host: str
    holder: int
    cause: str


@dataclass
class Reading:
    """What came of reading, on one rank.

    Attributes:
        faults: if there are any, what was read holds anything.
        rates: by place.
        notes: a line for each damage that nothing has to be refused for.
    """

    faults: list[Fault] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def extend(self, other: Reading) -> None:
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


class Source(Protocol):
    """A state; the same on all ranks."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def attempt(self) -> int:
        """That wrote it."""
        ...

    @property
    def name(self) -> str:
        """Of a durable checkpoint; else empty."""
        ...

    @property
    def state(self) -> Any:
        """What training had given besides tensors."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The resolved config of the run that kept it; empty where that is not known."""
        ...

    @property
    def tensors(self) -> Mapping[str, SavedBlocks]:
        """What it holds."""
        ...

    def distance(self, rank: int, holder: int) -> int:
        """How far a holder is from a rank: 0 is memory of its host."""
        ...

    def check(self) -> Reading:
        """Check this rank's share of what cannot be checked while it is read."""
        ...

    def check_beside(self) -> Reading:
        """Check this rank's share of what nothing is restored from; what is wrong there is only noted."""
        ...

    def verify(self) -> Reading:
        """Read and check this rank's share of all bytes, and keep none."""
        ...

    def read(self, wanted: Sequence[Part]) -> Reading:
        """Fill the targets of `wanted`; if there are faults, some of them hold anything."""
        ...


class RemoteCopy(Protocol):
    """A committed copy that another host holds."""

    @property
    def record(self) -> Record:
        """Its record."""
        ...

    @property
    def plan(self) -> ShardPlan:
        """Its plan."""
        ...

    def chunks(self, numbers: Sequence[int]) -> Iterator[memoryview]:
        """The chunks (of `CHUNK_BYTES`) of these numbers, in order, as they come; each holds until the next is taken.

        Raises:
            OSError: the connection is lost.
        """
        ...


class RemoteCopies(Protocol):
    """Reads what the keepers of other hosts hold."""

    def open(self, host: Endpoint, snapshot: SnapshotId, rank: int) -> AbstractContextManager[RemoteCopy]:
        """A copy on `host`; may be called from several threads.

        Raises:
            LookupError: it is not there any more. OSError: the host cannot be reached.
        """
        ...


@dataclass(frozen=True)
class Restored:
    """A state that was taken back; the same on all ranks, but for `differences.missing`.

    Attributes:
        step, attempt: of the state.
        state: what training had given besides tensors.
        source: ``memory`` where all came from keepers of the ranks' own hosts, ``peer`` where some came from another
            host's, ``durable`` where it came from durable storage.
        name: of the durable checkpoint; empty where it came from memory.
        seconds: in all, with looking and refusals.
        bytes_by_kind: what all ranks together took from each kind of source; with reading whole runs or archives,
            and nothing twice that was given on within a group.
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
