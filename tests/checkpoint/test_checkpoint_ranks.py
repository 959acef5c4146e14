"""What happens to checkpoints of several ranks when one of them fails, dies, or finds less than it expects."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import signal
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import assert_equal, rewrite
from hypothesis import given, settings
from hypothesis import strategies as st
from support.open_checkpoint import newest, open_checkpoint
from thread_ranks import Died, ThreadPeers, run_ranks, succeed
from torch import Tensor
from torch.distributed import FileStore

from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.format import dcp
from phalanx.checkpoint.format.manifest import Chunk, FileEntry, clash, cover_fault, overlap
from phalanx.checkpoint.restoring import durable_source
from phalanx.checkpoint.restoring.compatibility import names_on_no_rank, names_to_bits
from phalanx.checkpoint.restoring.durable_source import DurableSource, share_out
from phalanx.checkpoint.restoring.source import ReadReport
from phalanx.checkpoint.session.blocking_session import STAGES, save
from phalanx.checkpoint.snapshot_plans import Written, from_text, to_text
from phalanx.checkpoint.storage.folder import candidates
from phalanx.checkpoint.storage.retention import prune
from phalanx.core.errors import UserError
from phalanx.core.fault_points import NO_POINTS, Points
from phalanx.core.layout import Shard
from phalanx.core.peers import Peers
from phalanx.ipc.tree_peers import TreePeers

SIZE = 3
EVERY_RANK = [(rank, stage) for rank in range(SIZE) for stage in STAGES[:2]]  # the later points are rank 0's alone


def rows(rank: int, version: int) -> tuple[dict[str, Tensor], dict[str, Shard]]:
    """Two rows of six, of each version other numbers."""
    whole = torch.arange(12.0).reshape(6, 2) + 100 * version
    return {"w": whole[2 * rank : 2 * rank + 2]}, {"w": Shard.whole((6, 2)).rows(2 * rank, 2, ("shard",))}


def save_version(folder: Path, version: int, peers: Peers, points: Points = NO_POINTS) -> Path:
    tensors, shards = rows(peers.rank, version)
    return save(folder, version, tensors, {"version": version}, points=points, shards=shards, peers=peers)


def require_version(folder: Path, version: int) -> None:
    """All ranks agree on this one, and it is whole."""

    def body(peers: ThreadPeers) -> None:
        checkpoint = newest(folder, pytest.fail, peers=peers)
        assert checkpoint is not None and checkpoint.state == {"version": version}
        tensors, shards = rows(peers.rank, version)
        targets = {"w": torch.zeros(2, 2)}
        checkpoint.load_into(targets, shards=shards, peers=peers)
        assert_equal(targets, tensors)

    succeed(SIZE, body)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def failing(stage: str, error: BaseException) -> Points:
    def refuse(**_: object) -> None:
        raise error

    return Points({stage: refuse})


def save_with_failure(folder: Path, culprit: int, stage: str, error: BaseException) -> list[Any]:
    def body(peers: ThreadPeers) -> Path:
        return save_version(folder, 2, peers, failing(stage, error) if peers.rank == culprit else NO_POINTS)

    return run_ranks(SIZE, body)


@pytest.mark.parametrize(("culprit", "stage"), [*EVERY_RANK, (0, STAGES[2])])
def test_a_full_disk_on_one_rank_is_told_by_all(tmp_path: Path, culprit: int, stage: str) -> None:
    succeed(SIZE, lambda peers: save_version(tmp_path, 1, peers))
    results = save_with_failure(tmp_path, culprit, stage, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert all(isinstance(result, UserError) for result in results)
    assert len({str(result) for result in results}) == 1
    assert f"{tmp_path}: rank {culprit} ({platform.node()}): has no room for a checkpoint of" in str(results[0])
    assert names(tmp_path) == ["step-00000001"]
    require_version(tmp_path, 1)


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), KeyboardInterrupt()])
def test_other_errors_stay_what_they_are_where_they_happened(tmp_path: Path, error: BaseException) -> None:
    results = save_with_failure(tmp_path, 1, "checkpoint.begin", error)
    assert results[1] is error
    for other in (results[0], results[2]):
        assert isinstance(other, UserError)
        assert f"rank 1 ({platform.node()}): {type(error).__name__}" in str(other)
    assert names(tmp_path) == []


def test_a_save_after_a_failed_one_is_whole(tmp_path: Path) -> None:
    save_with_failure(tmp_path, 2, "checkpoint.tensors-written", OSError(errno.EIO, "Input/output error"))
    succeed(SIZE, lambda peers: save_version(tmp_path, 2, peers))
    require_version(tmp_path, 2)


@pytest.mark.parametrize(("culprit", "stage"), [*EVERY_RANK, (0, STAGES[2]), (0, STAGES[3])])
def test_a_rank_that_vanishes_leaves_no_checkpoint(tmp_path: Path, culprit: int, stage: str) -> None:
    """The others hear of it from their connection, not from the rank itself."""
    succeed(SIZE, lambda peers: save_version(tmp_path, 1, peers))

    def body(peers: ThreadPeers) -> Path:
        dying = Points({stage: lambda **_: peers.die()})
        return save_version(tmp_path, 2, peers, dying if peers.rank == culprit else NO_POINTS)

    results = run_ranks(SIZE, body)
    assert isinstance(results[culprit], Died | threading.BrokenBarrierError)
    assert all(isinstance(results[rank], threading.BrokenBarrierError) for rank in range(SIZE) if rank != culprit)
    # A rank that still writes while another clears up may leave something behind, which the next save removes.
    assert [name for name in names(tmp_path) if not name.startswith(".writing-")] == ["step-00000001"]
    require_version(tmp_path, 1)
    succeed(SIZE, lambda peers: save_version(tmp_path, 3, peers))
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def real_peers(folder: Path, rank: int, size: int) -> TreePeers:
    store = FileStore(str(folder / "store"), size)
    return TreePeers(store, rank, size, host="127.0.0.1", name="here", timeout_s=20.0)


def fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


@pytest.mark.parametrize(("culprit", "stage"), [(0, STAGES[1]), (1, STAGES[0]), (1, STAGES[1]), (0, STAGES[3])])
def test_a_killed_process_leaves_the_former_checkpoint(tmp_path: Path, culprit: int, stage: str) -> None:
    """Real processes, one ended by SIGKILL; the others end by themselves, and the next run is well."""
    folder = tmp_path / "checkpoints"
    succeed(SIZE, lambda peers: save_version(folder, 1, peers))

    def main(rank: int) -> None:
        kill = Points({stage: lambda **_: os.kill(os.getpid(), signal.SIGKILL)})
        save_version(folder, 2, real_peers(tmp_path, rank, SIZE), kill if rank == culprit else NO_POINTS)

    pids = [fork(lambda rank=rank: main(rank)) for rank in range(SIZE)]  # type: ignore[misc]
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert ended[culprit] == -signal.SIGKILL
    assert all(status == 1 for rank, status in enumerate(ended) if rank != culprit)
    require_version(folder, 1)
    assert names(folder) == ["step-00000001"]
    succeed(SIZE, lambda peers: save_version(folder, 2, peers))
    require_version(folder, 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("harm", "reason"), [(flip, ": bytes "), (Path.unlink, " is missing")])
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("readers", [1, 2, 5])
def test_a_harmed_file_of_any_rank_is_seen_by_all(
    tmp_path: Path, harm: Callable[[Path], None], reason: str, rank: int, readers: int
) -> None:
    for version in (1, 2):
        succeed(SIZE, lambda peers, version=version: save_version(tmp_path, version, peers))  # type: ignore[misc]
    harm(tmp_path / "step-00000002" / f"__{rank}_0.distcp")
    told: list[list[str]] = [[] for _ in range(readers)]

    def body(peers: ThreadPeers) -> Any:
        checkpoint = newest(tmp_path, told[peers.rank].append, peers=peers)
        return None if checkpoint is None else checkpoint.state

    assert succeed(readers, body) == [{"version": 1}] * readers
    assert [len(lines) for lines in told] == [1] + [0] * (readers - 1)
    assert "step-00000002 is damaged" in told[0][0] and f"__{rank}_0.distcp{reason}" in told[0][0]


def test_every_file_is_hashed_once_by_some_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = succeed(SIZE, lambda peers: save_version(tmp_path, 1, peers))[0]
    hashed: list[str] = []
    attempt = DurableSource._attempt

    def noted(source: DurableSource, reading: ReadReport, files: Any, file: str, work: Callable[[Any], None]) -> None:
        hashed.append(file)
        attempt(source, reading, files, file, work)

    monkeypatch.setattr(DurableSource, "_attempt", noted)
    succeed(SIZE, lambda peers: newest(tmp_path, pytest.fail, peers=peers))
    assert sorted(hashed) == sorted(set(names(path)) - {"manifest.json", "SHA256SUMS"})


def test_only_rank_0_reads_the_manifest_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    succeed(SIZE, lambda peers: save_version(tmp_path, 1, peers))
    readers: list[str] = []
    read_manifest = durable_source.read_manifest

    def noted(files: object, **how: Any) -> Any:
        readers.append(threading.current_thread().name)
        return read_manifest(files, **how)

    monkeypatch.setattr(durable_source, "read_manifest", noted)
    require_version(tmp_path, 1)
    assert len(set(readers)) == 1


def test_damage_found_while_reading_is_told_by_all(tmp_path: Path) -> None:
    path = succeed(SIZE, lambda peers: save_version(tmp_path, 1, peers))[0]

    def body(peers: ThreadPeers) -> None:
        checkpoint = newest(tmp_path, pytest.fail, peers=peers)
        assert checkpoint is not None
        if peers.rank == 0:
            os.truncate(path / "__1_0.distcp", 20)
        peers.barrier()
        checkpoint.load_into({"w": torch.zeros(2, 2)}, shards=rows(peers.rank, 1)[1], peers=peers)

    results = run_ranks(SIZE, body)
    assert all("its tensors cannot be read" in str(result) and "rank 1" in str(result) for result in results)


def test_no_checkpoint_and_a_newer_format_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    assert succeed(2, lambda peers: newest(tmp_path / "absent", pytest.fail, peers=peers)) == [None, None]
    path = save(tmp_path, 1, {})
    rewrite(path, lambda tree: tree.update(format_version=2))
    results = run_ranks(2, lambda peers: newest(tmp_path, pytest.fail, peers=peers))
    assert all("has format version 2, newer than 1" in str(result) for result in results)


def test_room_is_needed_for_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, _ = rows(0, 1)
    one = dcp.bytes_needed({"w": dcp.Block(tensors["w"], Shard.whole((2, 2)))})
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, 2 * one))
    results = run_ranks(SIZE, lambda peers: save_version(tmp_path, 1, peers))
    assert all(f"has no room for a checkpoint of {3 * one} bytes" in str(result) for result in results)
    assert names(tmp_path) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 0, 3 * one))
    succeed(SIZE, lambda peers: save_version(tmp_path, 1, peers))


def test_folders_that_are_not_shared_are_told(tmp_path: Path) -> None:
    def body(peers: ThreadPeers) -> Path:
        return save_version(tmp_path / f"host{peers.rank}", 1, peers)

    results = run_ranks(SIZE, body)
    assert all("is not the same folder here and on rank 0; put the run on a file system" in str(r) for r in results)
    assert names(tmp_path / "host0") == []


WRONG_SHARDS = {
    "overlap": (lambda rank: Shard((3, 2), (rank, 0), (2, 2)), r"\[0:2, 0:2\] and \[1:3, 0:2\] overlap"),
    "gap": (lambda rank: Shard((5, 2), (3 * rank, 0), (2, 2)), "8 of 10 elements"),
    "two owners": (lambda _: Shard.whole((2, 2)), "overlap"),
    "no owner": (lambda _: Shard.whole((2, 2), owner=False), "written by no rank"),
    "two shapes": (lambda rank: Shard((2 + rank, 2), (rank, 0), (2, 2)), r"w is float32 \[2, 2\] on one rank"),
}


@pytest.mark.parametrize("fault", WRONG_SHARDS)
def test_blocks_that_do_not_cover_a_tensor_once_are_a_mistake(tmp_path: Path, fault: str) -> None:
    shard, reason = WRONG_SHARDS[fault]

    def body(peers: ThreadPeers) -> Path:
        shards = {"w": shard(peers.rank)}
        return save(tmp_path, 1, {"w": torch.zeros(2, 2)}, shards=shards, peers=peers)

    first, second = run_ranks(2, body)
    with pytest.raises(RuntimeError, match=reason):
        raise first  # type: ignore[misc]
    with pytest.raises(UserError, match=r"rank 0 .*RuntimeError"):
        raise second  # type: ignore[misc]
    assert names(tmp_path) == []


def test_only_rank_0_deletes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, {})
    deleted = succeed(2, lambda peers: prune(tmp_path, CheckpointConfig(keep_last=1), good_step=3, peers=peers))
    assert [len(paths) for paths in deleted] == [2, 0]
    assert [c.step for c in candidates(tmp_path)] == [3]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_clashes_are_those_that_counting_finds(data: st.DataObject) -> None:
    """Against painting the boxes on a small board."""
    dimensions = data.draw(st.integers(0, 3))
    shape = [data.draw(st.integers(1, 4)) for _ in range(dimensions)]
    boxes = []
    for _ in range(data.draw(st.integers(0, 5))):
        offsets = [data.draw(st.integers(0, n)) for n in shape]
        sizes = [data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)]
        boxes.append(Shard(tuple(shape), tuple(offsets), tuple(sizes)))
    board = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        board[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] += 1
    assert (clash(boxes) is not None) == bool((board > 1).any())
    assert (cover_fault(shape, boxes) is None) == bool((board == 1).all())
    pair = clash(boxes)
    assert pair is None or overlap(*pair) is not None


def test_what_a_rank_sends_is_short() -> None:
    """At 12,288 ranks every byte of it counts 12,288 times, on every rank: here 36 blocks in under 1 kB."""
    keys = ("", ".exp_avg", ".exp_avg_sq")
    logical = [f"layers.{layer}.{part}" for layer in range(10, 13) for part in ("q", "k", "gate", "down")]
    chunk = Chunk(offsets=[1234, 0], sizes=[17, 12288], file="__7_0.distcp", offset=123456789, length=837_281)
    tensors = {f"model.{name}{key}": ("float32", [12288, 12288], chunk) for name in logical for key in keys}
    written = Written(FileEntry(name="__7_0.distcp", size_bytes=10**9, sha256="ab" * 32), tensors, ["model.norm"])
    assert from_text(to_text(written)) == written
    assert len(to_text(written)) < 1000


def test_which_names_no_rank_has() -> None:
    order = [f"t{i}" for i in range(70)]
    bits = [names_to_bits(order, {"t0", "t69"}), names_to_bits(order, set(order[2:69])), names_to_bits(order, set())]
    assert names_on_no_rank(order, bits) == ("t1",)
    assert names_on_no_rank([], [names_to_bits([], {"x"})]) == ()


def test_files_are_shared_out_evenly() -> None:
    files = {f"f{i}": i for i in range(100)}
    shares = share_out(files, 7)
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name] for name in share) for share in shares]
    assert max(loads) - min(loads) <= 10
    assert share_out({}, 3) == [[], [], []]


def test_exchanges_stay_small(tmp_path: Path) -> None:
    """Nothing the size of the tensors goes through the peers."""
    tensors = {f"layer{i}.weight": torch.zeros(1000, 10) for i in range(50)}
    shards = {name: Shard.whole((1000, 10)) for name in tensors}

    def body(peers: ThreadPeers) -> int:
        mine = tensors if peers.rank == 0 else {}
        path = save(tmp_path, 1, mine, shards=shards if mine else {}, peers=peers)
        checkpoint = newest(tmp_path, pytest.fail, peers=peers)
        assert checkpoint is not None and checkpoint.path == path
        return peers._exchange.longest

    assert max(succeed(2, body)) < 4000
    assert open_checkpoint(tmp_path / "step-00000001").manifest.files[1].size_bytes > 2_000_000
