"""The plan of a shard (what a rank puts into each snapshot) and the record that commits one.

Plans are fixed while the tensors are, so that a snapshot costs a copy. All that needs torch (which blocks there are,
the bytes around the elements in a ``torch.save`` archive, DCP's index) is worked out once, by the ranks together;
keeper and persister then work from these values alone.

An archive is written in one pass over elements that are not known when the bytes around them are made: torch's archive
writer leaves the checksum of the elements out of the header before them (bit 3 of the flags) and puts it behind them,
into a data descriptor and into the directory of the ZIP file (APPNOTE.TXT 4.3.9, 4.3.12). `with_crc32` does the same.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

Role = Literal["trained", "optimizer", "other"]
"""``trained``: a trainable parameter, which a step changes; ``optimizer``: its state; ``other``: not examined."""

ALIGN_BYTES = 64  # every piece begins at a multiple of this in a slot


@dataclass(frozen=True)
class Piece:
    """One block of a logical tensor, as it lies in a slot: row-major, without gaps, in the byte order of the host.

    Attributes:
        name: logical name of the tensor.
        dtype: as in torch without the prefix (``float32``).
        shape: of the whole tensor; `offsets` and `sizes` are of the block.
        start_bytes, length_bytes: where the elements lie in the slot.
        head, tail: the bytes before and after the elements in the archive that a file holds of it. The CRC-32 of the
            elements is zero in them; `with_crc32` puts it in.
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
    """What one rank writes of every snapshot: its shard; `pieces` in the order of their bytes in slot and file."""

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
        rows = []
        for p in self.pieces:
            texts = [base64.b64encode(part).decode() for part in (p.head, p.tail)]
            rows.append([p.name, p.dtype, p.shape, p.offsets, p.sizes, p.role, p.start_bytes, p.length_bytes, *texts])
        return json.dumps([self.rank, self.world_size, rows], separators=(",", ":")).encode()

    @staticmethod
    def from_bytes(content: bytes) -> ShardPlan:
        """The plan that `to_bytes` wrote."""
        rank, world_size, rows = json.loads(content)
        pieces = []
        for name, dtype, shape, offsets, sizes, role, start, length, head, tail in rows:
            box = (tuple(shape), tuple(offsets), tuple(sizes))
            around = (base64.b64decode(head), base64.b64decode(tail))
            pieces.append(Piece(name, dtype, *box, role, start, length, *around))
        return ShardPlan(rank, world_size, tuple(pieces))


@dataclass(frozen=True)
class JobPlan:
    """What is the same in every checkpoint of a job; rank 0, which publishes them, has it.

    Attributes:
        set_id: names the plans of all ranks together: SHA-256 of their `ShardPlan.sha256` in order of rank. Shards make
            up a whole only with others of the same set.
        shards: ranks that write something, in order.
        tensors: by name, the entries of a manifest's ``tensors`` (see `phalanx.checkpoint.format.manifest`).
        index: the bytes of DCP's ``.metadata``; the same at every step because the places of all bytes are.
        config: the resolved config of the run.
        layout: such as ``pp2·dp2·tp2``.
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


_DESCRIPTOR = b"PK\x07\x08"
_DIRECTORY_ENTRY = struct.Struct("<4s12xL8xHHH12x")  # signature, CRC-32, lengths of name, extra field and comment
_ENTRY_SIGNATURE = b"PK\x01\x02"
_CRC_IN_ENTRY = 16


def with_crc32(tail: bytes, crc32: int) -> bytes:
    """The end of an archive, with the CRC-32 of its elements put into the data descriptor and the directory's entry.

    Raises:
        ValueError: it is not the end of an archive of a tensor.
    """
    if not tail.startswith(_DESCRIPTOR):
        raise ValueError("the end of an archive does not begin with a data descriptor")
    place = tail.find(_ENTRY_SIGNATURE)
    while place >= 0 and tail.startswith(_ENTRY_SIGNATURE, place):
        _, _, name_length, extra_length, comment_length = _DIRECTORY_ENTRY.unpack_from(tail, place)
        first = place + _DIRECTORY_ENTRY.size
        if tail[first : first + name_length].endswith(b"/data/0"):
            content = bytearray(tail)
            struct.pack_into("<L", content, len(_DESCRIPTOR), crc32)
            struct.pack_into("<L", content, place + _CRC_IN_ENTRY, crc32)
            return bytes(content)
        place = first + name_length + extra_length + comment_length
    raise ValueError("the directory of an archive does not name the elements of a tensor")


CHUNK_BYTES = 4 << 20  # the elements of a slot are summed in runs of so many bytes
_CONFIG = "run_config"


class SnapshotId(NamedTuple):
    """Shards belong together when all of these are the same."""

    step: int
    attempt: int
    set_id: str


@dataclass(frozen=True)
class Record:
    """Commits a slot: without it, the slot counts as empty.

    Attributes:
        step, attempt, set_id: which snapshot; see `JobPlan`.
        rank: whose shard.
        shards: how many shards make up the snapshot.
        data_bytes: length of the elements in the slot.
        sums: XXH3-64 of every `CHUNK_BYTES` of them.
        state: what training wants back besides tensors, as JSON text; rank 0's shard has it, others an empty string.
        state_sum: XXH3-64 of `state`.
        stepped: whether, since the snapshot before, the optimizer took a step with a learning rate above zero.
        changed: whether any trained tensor of this shard differs from the snapshot before of the same attempt and set;
            None where it has none, or where there is nothing to compare with.
        sick: names of trained and optimizer tensors that hold a number that is not finite; some of them.
        unix_ns: when it was taken.
        metrics: figures for keeping the best, such as ``{"validation_loss": 3.1}``.
    """

    step: int
    attempt: int
    set_id: str
    rank: int
    shards: int
    plan_sha256: str
    data_bytes: int
    sums: tuple[int, ...]
    state: str = ""
    state_sum: int = 0
    stepped: bool = True
    changed: bool | None = None
    sick: tuple[str, ...] = ()
    unix_ns: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def snapshot(self) -> SnapshotId:
        """The snapshot it is a shard of."""
        return SnapshotId(self.step, self.attempt, self.set_id)

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Record:
        """The reverse of `to_text`."""
        tree = json.loads(text)
        return Record(**tree | {"sums": tuple(tree["sums"]), "sick": tuple(tree["sick"])})


def state_text(state: Any, config: Mapping[str, Any]) -> str:
    """What a record keeps as `state`: with the config of the run, which in durable storage the manifest has."""
    return json.dumps(state | {_CONFIG: config} if config and isinstance(state, dict) else state)


def parse_state(text: str) -> tuple[Any, dict[str, Any]]:
    """The state, and the config; that is empty where it was not kept."""
    state = json.loads(text)
    config = state.pop(_CONFIG, {}) if isinstance(state, dict) else {}
    return state, config if isinstance(config, dict) else {}


def is_stale(records: list[Record]) -> bool:
    """Whether the shards of one snapshot together say that training went on and yet nothing that is trained changed."""
    known = [record.changed for record in records if record.changed is not None]
    return bool(known) and not any(known) and any(record.stepped for record in records)


def sick_tensors(records: list[Record]) -> tuple[str, ...]:
    """Names of tensors of any of the shards that hold a number that is not finite."""
    return tuple(sorted({name for record in records for name in record.sick}))
