"""From tensors to plans: which rank writes which blocks, worked out once by all ranks together.

Each rank sends rank 0 what it writes as short text (`Written`); put together, each element is written exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from phalanx.checkpoint.all_ranks import at_first, collected, everywhere, pack, unpack
from phalanx.checkpoint.format import dcp
from phalanx.checkpoint.format.dcp import Block, held
from phalanx.checkpoint.format.manifest import Chunk, FileEntry, TensorEntry, cover_fault
from phalanx.checkpoint.format.shard_plan import JobPlan, Piece, Role, ShardPlan, aligned, set_id, with_crc32
from phalanx.core.layout import Shard
from phalanx.core.peers import Peers


@dataclass(frozen=True)
class AgreedBlocks:
    """What one rank knows after `agree_on_blocks`.

    Attributes:
        blocks: all that it holds, by name.
        mine: those of them that it writes.
        needed_bytes: about what the files of all ranks together will take.
    """

    blocks: Mapping[str, Block]
    mine: Mapping[str, Block]
    needed_bytes: int


def agree_on_blocks(
    tensors: Mapping[str, Tensor], shards: Mapping[str, Shard], peers: Peers, check: Callable[[], None] | None = None
) -> AgreedBlocks:
    """Called by all ranks together: owners write their blocks; what has no shard is written by the first that has it.

    Args:
        shards: which block of its logical tensor each of `tensors` is, and whether this rank writes it.
        check: done first, here; if it fails on one rank, nothing is agreed on any.

    Raises:
        ValueError: a shard has not the size of its tensor. UserError: that is so on another rank.
    """
    unsharded = [name for name in tensors if name not in shards]
    of_first = peers.broadcast(unsharded)
    extra = sorted(set(unsharded).difference(of_first))
    blocks: dict[str, Block] = {}

    def owned() -> set[str]:
        return {name for name, shard in shards.items() if shard.owner and name in blocks}

    def offer() -> list[Any]:
        if check is not None:
            check()
        blocks.update(held(tensors, shards))
        mine = owned() | set(unsharded if peers.rank == 0 else extra)
        return [dcp.bytes_needed({name: blocks[name] for name in mine}), extra]

    offers = everywhere(peers, offer)
    earlier = {name for _, names in offers[: peers.rank] for name in names}.union(of_first if peers.rank else ())
    names = owned() | set(unsharded).difference(earlier)
    mine = {name: block for name, block in blocks.items() if name in names}
    return AgreedBlocks(blocks, mine, sum(needed_bytes for needed_bytes, _ in offers))


Roles = Callable[[str], Role] | Mapping[str, Role]


class Plans(NamedTuple):
    """What one rank knows of the plans of all.

    Attributes:
        shard: of this rank; it has no pieces where the rank writes nothing.
        job: of the job; None on other ranks than the first.
        set_id: names the plans of all ranks together.
        shards: how many make up a snapshot.
    """

    shard: ShardPlan
    job: JobPlan | None
    set_id: str
    shards: int


def make_plans(
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, Shard] | None,
    roles: Roles,
    *,
    peers: Peers,
    config: Mapping[str, Any],
    layout: str,
) -> Plans:
    """Plan what each rank puts into every snapshot.

    Called by all ranks together, when the tensors exist and again when their names, shapes or shards have changed. Rank
    0's file is always there. Tables of what ranks hold go to rank 0 alone.

    Args:
        tensors: by logical name, as far as this rank has them; on any device, of any strides.
        roles: what each tensor is to training; those that a mapping does not name are ``other``.
        config: the resolved config of the run, as plain JSON values; rank 0's is kept.
        layout: such as ``pp2·dp2·tp2``.

    Raises:
        ValueError: a shard has not the size of its tensor.
        RuntimeError: the blocks of all ranks do not cover each tensor exactly once.
        UserError: one of these on another rank.
    """
    return plans_of(agree_on_blocks(tensors, shards or {}, peers), roles, peers=peers, config=config, layout=layout)


def plans_of(agreed: AgreedBlocks, roles: Roles, *, peers: Peers, config: Mapping[str, Any], layout: str) -> Plans:
    """The plans that follow from who writes what; called by all ranks together.

    Args, raises: as `make_plans`.
    """
    made: list[ShardPlan] = []

    def offer() -> list[str]:
        made.append(_shard_plan(agreed.mine, roles, peers))
        plan = made[0]
        # The file's name and size; what it will hold is not known yet.
        is_written = plan.pieces or plan.rank == 0
        file = FileEntry(name=plan.file, size_bytes=plan.file_bytes, sha256="") if is_written else None
        table: dict[str, tuple[str, list[int], Chunk | None]] = {}
        for name, block in agreed.mine.items():
            if 0 in block.shard.shape:
                table[name] = (dcp.dtype_name(block.tensor), list(block.shard.shape), None)
        for piece, offset in zip(plan.pieces, plan.offsets, strict=True):
            box = {"offsets": list(piece.offsets), "sizes": list(piece.sizes)}
            chunk = Chunk(**box, file=plan.file, offset=offset, length=piece.archive_bytes)
            table[piece.name] = (piece.dtype, list(piece.shape), chunk)
        # Tensors whose first element is held here and which another rank has to write.
        others = {name: block.shard for name, block in agreed.blocks.items() if name not in agreed.mine}
        left = sorted(n for n, s in others.items() if not any(s.offsets) and (s.numel > 0 or 0 in s.shape))
        return [plan.sha256, to_text(Written(file, table, left))]

    offers = collected(peers, offer) or []
    jobs: list[JobPlan] = []

    def put_together() -> list[Any]:
        from phalanx.checkpoint.format.dcp_index import index_bytes  # a second, which only this rank takes

        name, parts = set_id([sha256 for sha256, _ in offers]), [from_text(text) for _, text in offers]
        tensors = merge(parts)
        job = JobPlan(
            set_id=name,
            shards=tuple(rank for rank, part in enumerate(parts) if part.file is not None),
            tensors={key: entry.model_dump() for key, entry in tensors.items()},
            index=index_bytes(tensors),
            config=dict(config),
            layout=layout,
            torch_version=str(torch.__version__),
        )
        jobs.append(job)
        return [name, len(job.shards)]

    name, count = at_first(peers, put_together)
    return Plans(made[0], jobs[0] if jobs else None, name, count)


@dataclass(frozen=True)
class Written:
    """What one rank wrote.

    Attributes:
        file: its file; None if it had nothing to write.
        tensors: by name: dtype, global shape and this rank's chunk of it (None where the whole tensor is empty).
        left: tensors whose first element this rank holds and leaves to another rank to write.
    """

    file: FileEntry | None
    tensors: dict[str, tuple[str, list[int], Chunk | None]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def to_text(written: Written) -> str:
    """For `peers.gather`."""
    file = None if written.file is None else list(written.file.model_dump().values())
    tensors = {
        name: [dtype, shape, None if c is None else [c.offsets, c.sizes, c.offset, c.length]]
        for name, (dtype, shape, c) in written.tensors.items()
    }
    return pack([file, tensors, written.left])


def from_text(text: str) -> Written:
    """The reverse of `to_text`."""
    file, tensors, left = unpack(text)
    entry = None if file is None else FileEntry(**dict(zip(FileEntry.model_fields, file, strict=True)))

    def chunk(offsets: list[int], sizes: list[int], offset: int, length: int) -> Chunk:
        assert entry is not None, "a chunk without a file"
        return Chunk(offsets=offsets, sizes=sizes, file=entry.name, offset=offset, length=length)

    table = {n: (dtype, shape, c and chunk(*c)) for n, (dtype, shape, c) in tensors.items()}
    return Written(entry, table, left)


def merge(parts: Collection[Written]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint from what its ranks wrote, by name.

    Raises:
        RuntimeError: ranks disagree about a tensor, or do not cover it exactly once: the shards were made wrongly.
    """
    found: dict[str, tuple[str, list[int], list[Chunk]]] = {}
    for part in parts:
        for name, (dtype, shape, chunk) in part.tensors.items():
            known = found.setdefault(name, (dtype, shape, []))
            if known[:2] != (dtype, shape):
                raise RuntimeError(f"{name} is {known[0]} {known[1]} on one rank and {dtype} {shape} on another")
            known[2].extend([] if chunk is None else [chunk])
    lost = sorted({name for part in parts for name in part.left} - found.keys())
    if lost:
        raise RuntimeError(f"{', '.join(lost[:8])}: held, but written by no rank; none of the shards has an owner")
    entries = {}
    for name in sorted(found):
        dtype, shape, chunks = found[name]
        fault = cover_fault(shape, chunks)
        if fault is not None:
            files = ", ".join(sorted({chunk.file for chunk in chunks})[:8])
            raise RuntimeError(f"{name}, of shape {shape}, cannot be saved: {fault} (in {files}); its shards are wrong")
        entries[name] = TensorEntry(dtype=dtype, shape=shape, chunks=chunks)
    return entries


def _shard_plan(mine: Mapping[str, Block], roles: Roles, peers: Peers) -> ShardPlan:
    # The bytes of a ``torch.save`` archive before and after the elements, by dtype and sizes.
    known: dict[tuple[torch.dtype, tuple[int, ...]], tuple[bytes, bytes]] = {}
    pieces, end = [], 0
    for name, block in mine.items():
        shard, dtype = block.shard, block.tensor.dtype
        if not shard.numel:
            continue
        key = (dtype, shard.sizes)
        if key not in known:
            known[key] = _ends(dtype, shard.sizes)
        role = roles.get(name, "other") if isinstance(roles, Mapping) else roles(name)
        described = (name, dcp.dtype_name(block.tensor), shard.shape, shard.offsets, shard.sizes, role)
        start, length_bytes = aligned(end), shard.numel * dtype.itemsize
        pieces.append(Piece(*described, start, length_bytes, *known[key]))
        end = start + length_bytes
    return ShardPlan(peers.rank, peers.size, tuple(pieces))


def _ends(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What an archive of at least one element has before and after the elements, the CRC-32 of these zero."""
    # Memory that calloc gives is only read here, so all of its pages are the one page of zeros that the kernel shares;
    # torch's archive writer hands it over without a copy. (torch.serialization.skip_data needs a file on a disk.)
    zeros = np.zeros(dtype.itemsize * int(np.prod(sizes, dtype=np.int64)), dtype=np.uint8)
    split = _Split(range(zeros.ctypes.data, zeros.ctypes.data + zeros.nbytes))
    torch.save(torch.from_numpy(zeros).view(dtype).view(sizes), cast(Any, split))
    return bytes(split.head), with_crc32(bytes(split.tail), 0)


class _Split:
    """A file that keeps what is written into it before and after the elements, which lie at these addresses."""

    def __init__(self, elements: range) -> None:
        self._elements = elements
        self._seen = False
        self.head, self.tail = bytearray(), bytearray()

    def write(self, content: memoryview) -> int:
        view = np.asarray(content)
        if view.ctypes.data in self._elements:
            self._seen = True
        else:
            (self.tail if self._seen else self.head).extend(content)
        return view.nbytes

    def flush(self) -> None:
        """Nothing waits."""
