"""What the ranks of a job put into each snapshot: fixed while its tensors are, so that one costs a copy.

Torch-free. All that needs torch (which blocks there are, the bytes around the elements in a ``torch.save`` archive,
DCP's index) is worked out once, by the ranks together; keeper and persister then work from these values alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Role = Literal["trained", "optimizer", "other"]
"""``trained``: a trainable parameter, which a step changes; ``optimizer``: its state; ``other``: not examined."""

ALIGN_BYTES = 64
"""Every piece begins at a multiple of this in a slot."""


@dataclass(frozen=True)
class Piece:
    """One block of a logical tensor, as it lies in a slot: row-major, without gaps, in the byte order of the host.

    Attributes:
        name: logical name of the tensor.
        dtype: as in torch without the prefix (``float32``).
        shape: of the whole tensor.
        offsets, sizes: of the block.
        role: what it is to training.
        start_bytes, length_bytes: where the elements lie in the slot.
        head, tail: the bytes before and after the elements in the archive that a file holds of it. The CRC-32 of the
            elements is zero in them; `phalanx.checkpoint.format.archive_ends` puts it in.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    role: Role
    start_bytes: int
    length_bytes: int
    head: bytes = b""
    tail: bytes = b""

    @property
    def archive_bytes(self) -> int:
        """Length of the archive."""
        return len(self.head) + self.length_bytes + len(self.tail)


@dataclass(frozen=True)
class ShardPlan:
    """What one rank writes of every snapshot: its shard.

    Attributes:
        rank, world_size: whose shard, of how many ranks.
        pieces: in the order of their bytes in the slot and in the file.
    """

    rank: int
    world_size: int
    pieces: tuple[Piece, ...]

    @property
    def data_bytes(self) -> int:
        """Size of a slot."""
        return max((p.start_bytes + p.length_bytes for p in self.pieces), default=0)

    @property
    def file(self) -> str:
        """Name of the file of this shard in a durable checkpoint."""
        return f"__{self.rank}_0.distcp"

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where in the file the archive of each piece begins: at the next multiple of `ALIGN_BYTES`, so that elements,
        which are aligned within an archive, are so within the file."""
        offsets, end = [], 0
        for piece in self.pieces:
            offsets.append(aligned(end))
            end = offsets[-1] + piece.archive_bytes
        return tuple(offsets)

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return self.offsets[-1] + self.pieces[-1].archive_bytes if self.pieces else 0

    @cached_property
    def sha256(self) -> str:
        """A name for this plan."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """For `from_bytes`."""
        rows = [
            [p.name, p.dtype, p.shape, p.offsets, p.sizes, p.role, p.start_bytes, p.length_bytes, *_texts(p)]
            for p in self.pieces
        ]
        return json.dumps([self.rank, self.world_size, rows], separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(content: bytes) -> ShardPlan:
        """The plan that `to_bytes` wrote."""
        rank, world_size, rows = json.loads(content)
        pieces = tuple(
            Piece(n, d, tuple(sh), tuple(o), tuple(si), role, start, length, _bytes(head), _bytes(tail))
            for n, d, sh, o, si, role, start, length, head, tail in rows
        )
        return ShardPlan(rank, world_size, pieces)


@dataclass(frozen=True)
class JobPlan:
    """What is the same in every checkpoint of a job, for whoever publishes them; rank 0 has it.

    Attributes:
        set_id: names the plans of all ranks together: SHA-256 of their `ShardPlan.sha256` in order of rank. Shards make
            up a whole only with others of the same set.
        shards: ranks that write something, in order.
        tensors: by name, the entries of a manifest's ``tensors`` (see `phalanx.checkpoint.format.manifest`).
        index: the bytes of DCP's ``.metadata``; the same at every step because the places of all bytes are.
        config: the resolved config of the run.
        layout: such as ``pp2·dp2·tp2``.
        torch_version: of the writer.
    """

    set_id: str
    shards: tuple[int, ...]
    tensors: Mapping[str, Mapping[str, Any]]
    index: bytes
    config: Mapping[str, Any]
    layout: str
    torch_version: str

    def to_bytes(self) -> bytes:
        """For `from_bytes`."""
        return json.dumps({**vars(self), "index": base64.b64encode(self.index).decode()}).encode()

    @staticmethod
    def from_bytes(content: bytes) -> JobPlan:
        """The plan that `to_bytes` wrote."""
        tree = json.loads(content)
        tree |= {"index": base64.b64decode(tree["index"]), "shards": tuple(tree["shards"])}
        return JobPlan(**tree)


def aligned(offset_bytes: int) -> int:
    """The next place, from `offset_bytes` on, at which a piece may begin."""
    return -(-offset_bytes // ALIGN_BYTES) * ALIGN_BYTES


def set_id(plan_sha256s: list[str]) -> str:
    """The name of the plans of all ranks, in order of rank."""
    return hashlib.sha256("".join(plan_sha256s).encode()).hexdigest()


def _texts(piece: Piece) -> list[str]:
    return [base64.b64encode(part).decode() for part in (piece.head, piece.tail)]


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
