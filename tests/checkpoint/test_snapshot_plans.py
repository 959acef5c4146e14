"""Plans made from tensors: what is written by them is what `save` writes, and everybody can read it."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from checkpoint_helpers import assert_equal, blank, make_tensors
from planned_files import elements, file_content, round_tripped, slot, write_folder
from support.open_checkpoint import newest, open_checkpoint
from thread_ranks import ThreadPeers, run_ranks, succeed
from torch import Tensor

from phalanx.checkpoint.format.shard_plan import JobPlan, ShardPlan, set_id
from phalanx.checkpoint.session.blocking_session import save
from phalanx.checkpoint.snapshot_plans import make_plans
from phalanx.core.errors import UserError
from phalanx.core.layout import Shard
from phalanx.core.peers import ALONE

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16,
)  # fmt: skip


def of_every_dtype() -> dict[str, Tensor]:
    numbers = torch.randn(7, 3, generator=torch.Generator().manual_seed(1)) * 50
    made = {str(dtype): numbers.abs().to(dtype) if dtype == torch.uint16 else numbers.to(dtype) for dtype in DTYPES}
    return made | {"conjugate": torch.randn(3, 2, dtype=torch.complex64).conj()}


def every_tensor() -> dict[str, Tensor]:
    return make_tensors() | of_every_dtype() | {"zero-d": torch.tensor(3.5, dtype=torch.bfloat16)}


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert set(left) == set(right)
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape), name
        assert elements(tensor) == elements(right[name]), name


def alone(tensors: dict[str, Tensor]) -> tuple[ShardPlan, JobPlan]:
    plan, job, name, shards = make_plans(tensors, None, {}, peers=ALONE, config={"a": 1}, layout="dp1")
    assert job is not None and job.set_id == name == set_id([plan.sha256]) and shards == 1
    return ShardPlan.from_bytes(plan.to_bytes()), round_tripped(job)


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    plan, job = alone(tensors)
    path = folder / "step-00000005"
    path.mkdir(parents=True)
    write_folder(path, job, {plan.file: file_content(plan, slot(plan, tensors))}, {"loader": 3})
    return path


def test_planned_files_are_read_by_ours_and_equal_what_save_writes(tmp_path: Path) -> None:
    tensors = every_tensor()
    planned = open_checkpoint(written(tmp_path / "planned", tensors))
    saved = open_checkpoint(save(tmp_path / "saved", 5, tensors, {"loader": 3}))
    targets = blank(tensors)
    planned.load_into(targets)
    assert_same_bits(targets, tensors)
    assert_same_bits(planned.read(), saved.read())
    assert planned.state == saved.state
    for name, entry in saved.manifest.tensors.items():
        mine = planned.manifest.tensors[name]
        assert (mine.dtype, mine.shape) == (entry.dtype, entry.shape)
        assert [(c.file, c.offsets, c.sizes) for c in mine.chunks] == [
            (c.file, c.offsets, c.sizes) for c in entry.chunks
        ]


def test_planned_files_are_read_by_dcp(tmp_path: Path) -> None:
    tensors = every_tensor()
    path = written(tmp_path, tensors)
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    torch_dcp.load(targets, checkpoint_id=path, no_dist=True)
    assert_same_bits(targets, tensors)


def test_archives_are_what_torch_save_writes_and_whole_zip_files(tmp_path: Path) -> None:
    tensors = every_tensor()
    plan, _ = alone(tensors)
    content = file_content(plan, slot(plan, tensors))
    assert plan.file_bytes == len(content)
    for piece, offset in zip(plan.pieces, plan.offsets, strict=True):
        archive = content[offset : offset + piece.archive_bytes]
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            assert opened.testzip() is None, piece.name
        assert (offset + len(piece.head)) % 64 == 0
        assert piece.start_bytes % 64 == 0
        assert_same_bits({"": torch.load(io.BytesIO(archive), weights_only=True)}, {"": tensors[piece.name]})
        plain = io.BytesIO()
        torch.save(tensors[piece.name].detach().resolve_conj().contiguous().clone(), plain)
        assert len(plain.getvalue()) == len(archive)


def test_checksums_of_zero_are_accepted_by_torch() -> None:
    tensors = every_tensor()
    plan, _ = alone(tensors)
    for piece in plan.pieces:
        archive = io.BytesIO(piece.head + elements(tensors[piece.name]) + piece.tail)
        assert_same_bits({"": torch.load(archive, weights_only=True)}, {"": tensors[piece.name]})


def held_by(rank: int) -> tuple[dict[str, Tensor], dict[str, Shard]]:
    """Of four ranks: ``w`` cut by rows and by columns, ``copy`` owned by rank 1, ``mine`` of rank 3 alone, ``none``
    empty here and there."""
    w = torch.arange(48.0).reshape(6, 8)
    row, column = divmod(rank, 2)
    box = Shard((6, 8), (3 * row, 4 * column), (3, 4), ("tensor",))
    tensors = {
        "w": w[3 * row : 3 * row + 3, 4 * column : 4 * column + 4],
        "copy": torch.arange(5),
        "rng": torch.ones(2),
    }
    shards = {"w": box, "copy": Shard.whole((5,), owner=rank == 1)}
    count = 3 if rank == 2 else 0
    tensors["rows"] = torch.arange(3.0)[:count]
    shards["rows"] = Shard((3,), (0,), (count,), ("shard",))
    return (tensors | ({"mine": torch.full((2, 2), 7)} if rank == 3 else {})), shards


@pytest.mark.parametrize("silent", [None, 0, 2])
def test_ranks_write_what_save_has_them_write(tmp_path: Path, silent: int | None) -> None:
    """`silent`: a rank that has only copies of what others write."""

    def held_here(rank: int) -> tuple[dict[str, Tensor], dict[str, Shard]]:
        if silent is None:
            return held_by(rank)
        whole = {"copy": torch.arange(5), "more": torch.arange(4).to(torch.bfloat16)}
        owner = 1
        return whole, {name: Shard.whole(tuple(t.shape), owner=rank == owner) for name, t in whole.items()}

    def body(peers: ThreadPeers) -> tuple[ShardPlan, JobPlan | None, str, int, bytes]:
        tensors, shards = held_here(peers.rank)
        save(tmp_path / "saved", 5, tensors, shards=shards, peers=peers)
        plan, job, name, count = make_plans(tensors, shards, lambda _: "other", peers=peers, config={}, layout="x")
        return plan, job, name, count, file_content(plan, slot(plan, tensors))

    parts = succeed(4, body)
    job = parts[0][1]
    assert job is not None and all(part[1] is None for part in parts[1:])
    assert {part[2] for part in parts} == {job.set_id} == {set_id([part[0].sha256 for part in parts])}
    assert {part[3] for part in parts} == {len(job.shards)}
    assert job.shards == ((0, 1, 2, 3) if silent is None else (0, 1))
    path = tmp_path / "planned" / "step-00000005"
    path.mkdir(parents=True)
    write_folder(path, job, {part[0].file: part[4] for part in parts if part[0].rank in job.shards})
    saved = newest(tmp_path / "saved", pytest.fail)
    assert saved is not None
    assert_equal(open_checkpoint(path).read(), saved.read())
    planned = {f.name for f in open_checkpoint(path).manifest.files}
    assert {f.name for f in saved.manifest.files} == planned | {f"part-{rank}.json" for rank in job.shards}
    shards = planned - {".metadata"}  # DCP puts a number drawn at random into that
    assert all((saved.path / name).read_bytes() == (path / name).read_bytes() for name in shards)


def test_roles_and_order() -> None:
    tensors = {"b": torch.ones(3), "a": torch.ones(2), "c": torch.ones(1)}
    plan, *_ = make_plans(tensors, None, {"a": "trained", "c": "optimizer"}, peers=ALONE, config={}, layout="")
    assert [(p.name, p.role, p.start_bytes) for p in plan.pieces] == [
        ("b", "other", 0), ("a", "trained", 64), ("c", "optimizer", 128),
    ]  # fmt: skip
    assert plan.data_bytes == 132


def test_blocks_that_leave_a_hole_are_refused_by_all_ranks() -> None:
    def body(peers: ThreadPeers) -> None:
        shard = Shard((4,), (peers.rank,), (1,), ("shard",))
        make_plans({"w": torch.ones(1)}, {"w": shard}, {}, peers=peers, config={}, layout="")

    results = run_ranks(2, body)
    assert isinstance(results[0], RuntimeError) and "w" in str(results[0])
    assert isinstance(results[1], UserError) and "rank 0" in str(results[1])


def test_a_tensor_that_nobody_writes_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no rank"):
        shards = {"w": Shard.whole((4,), owner=False)}
        make_plans({"w": torch.ones(4)}, shards, {}, peers=ALONE, config={}, layout="")
