"""Hosts that hold snapshots, keepers and peers to read them, groups of threads, and layouts, for tests of restoring."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import torch
from support.chunk_sums import chunk_sums
from thread_ranks import PATIENCE_S, ThreadPeers, succeed
from torch import Tensor

from phalanx.checkpoint.format.checkpoint_files import FolderFiles
from phalanx.checkpoint.format.run_sums import state_sum
from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper_contract import Endpoint, Held, KeeperLostError
from phalanx.checkpoint.restoring.restore import Restored, SpoiltError, restore
from phalanx.checkpoint.session.blocking_session import save
from phalanx.checkpoint.snapshot_plans import make_plans
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.core.layout import Axis, Layout, Shard

T = TypeVar("T")
GIGABIT = 125_000_000


@dataclass
class Copy:
    """A committed copy in the memory of a host."""

    record: Record
    plan: ShardPlan
    memory: bytearray
    is_replica: bool = False


@dataclass
class Host:
    """What plays a host: its copies, and whether its keeper lives."""

    name: str
    copies: dict[tuple[SnapshotId, int], Copy] = field(default_factory=dict)
    reads_left: int | None = None

    def use(self) -> None:
        if self.reads_left == 0:
            raise KeeperLostError("connection reset")
        if self.reads_left is not None:
            self.reads_left -= 1


class FakeKeeper:
    """The part of a keeper that restoring uses."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.endpoint = Endpoint(host.name, ("127.0.0.1",), 7000, "eth0", 8 * GIGABIT)

    def held(self) -> list[Held]:
        return [Held(copy.record, copy.is_replica) for copy in self._host.copies.values()]

    @contextmanager
    def read(self, snapshot: SnapshotId, rank: int) -> Iterator[tuple[Record, ShardPlan, memoryview]]:
        self._host.use()
        if (snapshot, rank) not in self._host.copies:
            raise LookupError("it is not there any more")
        copy = self._host.copies[snapshot, rank]
        yield copy.record, copy.plan, memoryview(copy.memory).toreadonly()


@dataclass
class FakeRemoteCopy:
    record: Record
    plan: ShardPlan
    memory: bytearray

    def chunks(self, numbers: Sequence[int]) -> Iterator[memoryview]:
        buffer = bytearray(CHUNK_BYTES)
        for number in numbers:
            data = memoryview(self.memory)[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            buffer[: len(data)] = data
            yield memoryview(buffer)[: len(data)]


class FakePeers:
    """Reads what other hosts hold."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = {host.name: host for host in hosts}

    @contextmanager
    def open(self, host: Endpoint, snapshot: SnapshotId, rank: int) -> Iterator[FakeRemoteCopy]:
        copies = self._hosts[host.host].copies
        if (snapshot, rank) not in copies:
            raise LookupError(f"{host.host}: it is not there any more")
        copy = copies[snapshot, rank]
        yield FakeRemoteCopy(copy.record, copy.plan, copy.memory)


class ThreadCopies:
    """One member of a group of threads."""

    def __init__(self, axes: tuple[Axis, ...], index: int, group: ThreadGroup) -> None:
        self.axes, self.index, self.size, self._group = axes, index, group.size, group

    def broadcast(self, tensor: Any, source: int) -> None:
        assert tensor.is_contiguous()
        if self.index == source:
            self._group.value = tensor
            self._group.given_bytes += tensor.numel() * tensor.element_size()
            self._group.largest_bytes = max(self._group.largest_bytes, tensor.numel() * tensor.element_size())
        self._group.barrier.wait()
        if self.index != source:
            assert self._group.value.shape == tensor.shape and self._group.value.dtype == tensor.dtype
            tensor.copy_(self._group.value)
        self._group.barrier.wait()


class ThreadGroup:
    """What its members share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self.value = torch.empty(0)
        self.given_bytes = 0
        self.largest_bytes = 0


def groups(layout: Layout, *axes: Axis) -> dict[int, ThreadCopies]:
    """Of each rank, its group over `axes`."""
    found = {}
    for ranks in layout.groups(axes):
        group = ThreadGroup(len(ranks))
        found |= {rank: ThreadCopies(axes, index, group) for index, rank in enumerate(ranks)}
    return found


def some_tensors(scale: int = 1, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "model.norm": normal(37).bfloat16(),
        "model.rows": normal(64 * scale, 24),
        "model.columns": normal(40, 32 * scale).to(torch.float16),
        "optim.rows.exp_avg": normal(64 * scale, 24),
        "optim.flat": normal(1000 * scale).double(),
        "optim.step": torch.tensor(float(seed)),
        "optim.flags": torch.tensor([True, False, True, True, False]),
        "optim.none_yet": torch.empty(0, 3),
        "rng.cpu": generator.get_state(),
    }


def shards_of(layout: Layout, rank: int, tensors: Mapping[str, Tensor], seed: int = 0) -> dict[str, Shard]:
    """Rows and columns over the tensor axis, flat state over all ranks (ZeRO), the rest on all; owners take turns."""
    replica, part = layout.coordinates(rank).replicate, layout.coordinates(rank).tensor
    found = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if name.startswith("rng"):
            continue
        is_mine = replica == (number + seed) % layout.replicate
        shape = tuple(tensor.shape)
        if name == "optim.flat":
            axes: tuple[Axis, ...] = ("replicate", "tensor")
            found[name] = _cut(shape, 0, replica * layout.tensor + part, layout.size(*axes), axes, True)
        elif "rows" in name or "columns" in name:
            found[name] = _cut(shape, 1 if "columns" in name else 0, part, layout.tensor, ("tensor",), is_mine)
        else:
            found[name] = Shard.whole(shape, owner=is_mine and part == 0)
    return found


def _cut(shape: tuple[int, ...], axis: int, index: int, count: int, axes: tuple[Axis, ...], owner: bool) -> Shard:
    first, end = shape[axis] * index // count, shape[axis] * (index + 1) // count
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[axis], sizes[axis] = first, end - first
    return Shard(shape, tuple(offsets), tuple(sizes), axes, owner)


def part_of(tensor: Tensor, shard: Shard | None) -> Tensor:
    for dimension, (offset, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True) if shard else ()):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def parts_of(tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> dict[str, Tensor]:
    return {name: part_of(tensor, shards.get(name)).contiguous() for name, tensor in tensors.items()}


def take(
    tensors: Mapping[str, Tensor], layout: Layout, step: int, hosts: Sequence[Host], attempt: int = 1, **changes: Any
) -> SnapshotId:
    """Every rank of `layout` puts a snapshot into the memory of its host; ranks are divided evenly among `hosts`."""

    def body(peers: ThreadPeers) -> SnapshotId:
        shards = shards_of(layout, peers.rank, tensors)
        mine = parts_of(tensors, shards)
        plan, _, set_id, count = make_plans(mine, shards, {}, peers=peers, config={}, layout=str(layout))
        memory = bytearray(plan.data_bytes)
        for piece in plan.pieces:
            content = bytes(mine[piece.name].reshape(-1).view(torch.uint8).numpy())
            memory[piece.start_bytes : piece.start_bytes + piece.length_bytes] = content
        state = json.dumps({"step": step}) if peers.rank == 0 else ""
        record = Record(
            step,
            attempt,
            set_id,
            peers.rank,
            count,
            plan.sha256,
            plan.data_bytes,
            chunk_sums(memory, plan.data_bytes),
            state,
            state_sum(state),
        )
        if peers.rank == 0 or plan.pieces:
            copy = Copy(replace(record, **changes), plan, memory)
            hosts[peers.rank * len(hosts) // peers.size].copies[record.snapshot, peers.rank] = copy
        return record.snapshot

    return succeed(layout.world_size, body)[0]


def replicate(source: Host, target: Host) -> None:
    """Copies of all that `source` holds."""
    for key, copy in source.copies.items():
        target.copies[key] = replace(copy, memory=bytearray(copy.memory), is_replica=True)


def save_durable(folder: Path, tensors: Mapping[str, Tensor], layout: Layout, step: int, meta: Any = None) -> Path:
    def body(peers: ThreadPeers) -> Path:
        shards = shards_of(layout, peers.rank, tensors)
        return save(folder, step, parts_of(tensors, shards), {"step": step}, meta, shards=shards, peers=peers)

    return succeed(layout.world_size, body)[0]


@dataclass
class Outcome:
    """Of one rank."""

    restored: Restored | None
    lines: list[str]
    is_spoilt: bool = False


def restore_all(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    hosts: Sequence[Host | None] = (),
    folder: Path | LocalStore | None = None,
    copies: Mapping[int, ThreadCopies] | None = None,
    **options: Any,
) -> list[Outcome]:
    """Restore on all ranks, divided evenly among `hosts` (None: no keeper), and hold every rank's blocks against
    `tensors`, where something was restored."""
    store = LocalStore(folder) if isinstance(folder, Path) else folder
    remote = FakePeers([host for host in hosts if host is not None])

    def body(peers: ThreadPeers) -> Outcome:
        host = hosts[peers.rank * len(hosts) // peers.size] if hosts else None
        shards = shards_of(layout, peers.rank, tensors, seed=1)
        expected = parts_of(tensors, shards)
        targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        lines: list[str] = []
        try:
            restored = restore(
                targets,
                keeper=None if host is None else cast(Any, FakeKeeper(host)),
                store=store,
                report=lines.append,
                shards=shards,
                peers=cast(Any, peers),
                copies=None if copies is None else copies[peers.rank],
                remote=remote,
                **options,
            )
        except SpoiltError:
            return Outcome(None, lines, is_spoilt=True)
        if restored is not None:
            for name, tensor in expected.items():
                assert torch.equal(targets[name], tensor), f"rank {peers.rank}: {name}"
        return Outcome(restored, lines)

    return succeed(layout.world_size, body)


@dataclass(frozen=True)
class CountingFiles(FolderFiles):
    count: Callable[[int], None]

    def open(self, file: str) -> BinaryIO:
        return cast(BinaryIO, _Counting((self.path / file).open("rb", buffering=0), self.count))


class CountingStore(LocalStore):
    """Counts what is read of files of tensors."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read_bytes = 0
        self._lock = threading.Lock()

    def at(self, name: str) -> FolderFiles:
        return CountingFiles(self.path / name, self.count)

    def count(self, size_bytes: int) -> None:
        with self._lock:
            self.read_bytes += size_bytes


class _Counting(io.RawIOBase):
    def __init__(self, raw: Any, count: Callable[[int], None]) -> None:
        self._raw, self._count = raw, count

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._raw.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        count = int(self._raw.readinto(buffer))
        self._count(count)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
