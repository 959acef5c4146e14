"""Saved in one layout, read in another: blocks of random tensors, bit for bit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock
from checkpoint_helpers import assert_equal, blank, make_tensors
from earlier_writer import write_earlier
from hypothesis import given, settings
from hypothesis import strategies as st
from support.open_checkpoint import Checkpoint, newest, open_checkpoint
from thread_ranks import ThreadPeers, run_ranks, succeed
from torch import Tensor

from phalanx.checkpoint.format import checkpoint_files, dcp
from phalanx.checkpoint.format.manifest import Meta
from phalanx.checkpoint.session.blocking_session import save
from phalanx.core.errors import UserError
from phalanx.core.layout import Shard

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64]
Layout = list[dict[str, Shard]]
"""What each rank holds."""


def part_of(tensor: Tensor, shard: Shard) -> Tensor:
    for dimension, (offset, size) in enumerate(zip(shard.offsets, shard.sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def parts(tensors: dict[str, Tensor], shards: dict[str, Shard]) -> dict[str, Tensor]:
    return {name: part_of(tensors[name], shard) for name, shard in shards.items()}


def save_as(folder: Path, step: int, tensors: dict[str, Tensor], layout: Layout) -> Path:
    def body(peers: ThreadPeers) -> Path:
        shards = layout[peers.rank]
        return save(folder, step, parts(tensors, shards), {"rank": peers.rank}, shards=shards, peers=peers)

    paths = succeed(len(layout), body)
    assert len(set(paths)) == 1
    return paths[0]


def load_as(folder: Path, tensors: dict[str, Tensor], layout: Layout) -> None:
    """Load in `layout` and hold every rank's blocks against `tensors`."""

    def body(peers: ThreadPeers) -> None:
        shards = layout[peers.rank]
        checkpoint = newest(folder, pytest.fail, peers=peers)
        assert checkpoint is not None and checkpoint.state == {"rank": 0}
        targets = blank(parts(tensors, shards))
        differences = checkpoint.load_into(targets, shards=shards, peers=peers)
        assert differences.missing == differences.unexpected == ()
        assert_equal(targets, parts(tensors, shards))

    succeed(len(layout), body)


@st.composite
def borders(draw: st.DrawFn, length: int, count: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, length), min_size=count - 1, max_size=count - 1))
    return [0, *sorted(inner), length]


@st.composite
def layouts(draw: st.DrawFn, tensors: dict[str, Tensor]) -> Layout:
    """Each tensor whole on some ranks, or cut into uneven rows, columns or a grid, each block on one rank or more."""
    size = draw(st.integers(1, 5))
    layout: Layout = [{} for _ in range(size)]
    for name, tensor in tensors.items():
        cuts = [draw(borders(n, draw(st.integers(1, 3)))) for n in tensor.shape]
        spans = [[(a, b - a) for a, b in itertools.pairwise(cut)] for cut in cuts]
        boxes: list[tuple[tuple[int, int], ...]] = [()]
        for span in spans:
            boxes = [(*box, one) for box in boxes for one in span]
        free = draw(st.permutations(range(size)))
        if len(boxes) > size:
            boxes = [tuple((0, n) for n in tensor.shape)]
        for index, box in enumerate(boxes):
            shard = Shard(tuple(tensor.shape), tuple(o for o, _ in box), tuple(s for _, s in box))
            layout[free[index]][name] = shard
        for rank in free[len(boxes) :]:
            copy = draw(st.none() | st.integers(0, len(boxes) - 1))
            if copy is not None:
                layout[rank][name] = replace(layout[free[copy]][name], owner=False)
    return layout


@st.composite
def some_tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=4))
    tensors = {}
    for index, shape in enumerate(shapes):
        dtype = draw(st.sampled_from(DTYPES))
        values = torch.arange(1, 1 + math.prod(shape)) * (index + 3)
        tensors[f"t{index}"] = (values % 2 if dtype is torch.bool else values).to(dtype).reshape(shape)
    return tensors


@pytest.mark.parametrize("small_bytes", [1 << 18, 0], ids=["archives-whole", "rows-only"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_layout_reads_what_any_layout_wrote(
    tmp_path_factory: pytest.TempPathFactory, small_bytes: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "_SMALL_BYTES", small_bytes)
        patch.setattr(dcp, "SLAB_BYTES", 16)
        folder = tmp_path_factory.mktemp("reshard", numbered=True)
        tensors = data.draw(some_tensors())
        path = save_as(folder, 1, tensors, data.draw(layouts(tensors)))
        load_as(folder, tensors, data.draw(layouts(tensors)))
        assert_equal(open_checkpoint(path).read(), tensors)


def row_splits(tensors: dict[str, Tensor], size: int) -> Layout:
    """Rows in `size` parts, numbers on the last rank alone, what has fewer rows than ranks with empty parts."""
    layout: Layout = [{} for _ in range(size)]
    for name, tensor in tensors.items():
        for rank in range(size):
            shape = tuple(tensor.shape)
            if tensor.ndim == 0:
                layout[rank][name] = Shard.whole(shape, owner=rank == size - 1)
                continue
            first, after = (shape[0] * r // size for r in (rank, rank + 1))
            layout[rank][name] = Shard.whole(shape).rows(first, after - first, ("shard",))
    return layout


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("size", [2, 5])
def test_stock_dcp_reads_what_several_ranks_wrote(tmp_path: Path, size: int) -> None:
    tensors = make_tensors(8)
    path = save_as(tmp_path, 1, tensors, row_splits(tensors, size))
    assert {f"__{rank}_0.distcp" for rank in range(size)} <= {file.name for file in path.iterdir()}
    targets = blank(tensors)
    stock.load(targets, checkpoint_id=path, no_dist=True)
    assert_equal(targets, tensors)


def test_what_is_not_sharded_is_written_once_by_the_first_that_has_it(tmp_path: Path) -> None:
    def body(peers: ThreadPeers) -> Path:
        tensors = {"rng": torch.full((9,), float(peers.rank)), "counter": torch.tensor(peers.rank)}
        if peers.rank:
            tensors["later"] = torch.full((4,), 10.0 + peers.rank)
        if peers.rank == 2:
            tensors["last"] = torch.ones(3)
        return save(tmp_path, 3, tensors, peers=peers)

    checkpoint = open_checkpoint(succeed(3, body)[0])
    tensors = checkpoint.read()
    assert tensors["rng"].tolist() == [0.0] * 9
    assert tensors["counter"].item() == 0
    assert tensors["later"].tolist() == [11.0] * 4
    assert tensors["last"].tolist() == [1.0] * 3
    files = {name: [chunk.file for chunk in entry.chunks] for name, entry in checkpoint.manifest.tensors.items()}
    assert files["rng"] == files["counter"] == ["__0_0.distcp"]
    assert (files["later"], files["last"]) == (["__1_0.distcp"], ["__2_0.distcp"])


def test_stages_have_different_names_and_none_is_unexpected(tmp_path: Path) -> None:
    stages = [{"a": torch.ones(2), "b": torch.zeros(3)}, {"c": torch.full((4,), 2.0)}]
    tensors = stages[0] | stages[1]
    layout: Layout = [{name: Shard.whole(tuple(t.shape)) for name, t in stage.items()} for stage in stages]
    save_as(tmp_path, 1, tensors, layout)
    load_as(tmp_path, tensors, layout)
    load_as(tmp_path, tensors, [layout[0] | layout[1]])


def test_state_and_meta_are_those_of_rank_0(tmp_path: Path) -> None:
    def body(peers: ThreadPeers) -> Path:
        return save(tmp_path, 1, {}, {"rank": peers.rank}, Meta({"rank": peers.rank}), peers=peers)

    checkpoint = open_checkpoint(succeed(3, body)[2])
    assert checkpoint.state == {"rank": 0}
    assert checkpoint.manifest.config == {"rank": 0}


def load_everywhere(folder: Path, targets: list[dict[str, Tensor]], **options: bool) -> list[object]:
    def body(peers: ThreadPeers) -> object:
        checkpoint = newest(folder, pytest.fail, peers=peers)
        assert checkpoint is not None
        return checkpoint.load_into(targets[peers.rank], peers=peers, **options)

    return list(run_ranks(len(targets), body))


def test_what_does_not_fit_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": torch.ones(4), "b": torch.ones(2), "c": torch.ones(1)})
    targets = [{"a": torch.zeros(4)}, {"b": torch.zeros(3), "new": torch.zeros(1)}]
    results = load_everywhere(tmp_path, targets)
    texts = [str(result) for result in results]
    assert all(isinstance(result, UserError) for result in results)
    assert texts[0] == texts[1]
    assert "rank 1: b has shape (3,) here and (2,) in the checkpoint" in texts[0]
    assert "rank 1: 1 missing in the checkpoint: new" in texts[0]
    assert "1 only in the checkpoint: c" in texts[0]
    assert not targets[0]["a"].any()


def test_loosely_each_rank_learns_what_it_misses(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": torch.ones(4), "b": torch.ones(2), "c": torch.ones(1)})
    targets = [{"a": torch.zeros(4)}, {"b": torch.zeros(2), "new": torch.zeros(1)}]
    first, second = load_everywhere(tmp_path, targets, strict=False)
    assert (first.missing, second.missing) == ((), ("new",))  # type: ignore[attr-defined]
    assert first.unexpected == second.unexpected == ("c",)  # type: ignore[attr-defined]
    assert targets[0]["a"].all() and targets[1]["b"].all()


def test_only_the_bytes_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the rows of a large tensor written by one process, and no file of which nothing is needed."""
    tensors = {"big": torch.randn(1000, 500), "other": torch.randn(1000, 500)}
    layout: Layout = [{"big": Shard.whole((1000, 500))}, {"other": Shard.whole((1000, 500))}]
    checkpoint = open_checkpoint(save_as(tmp_path, 1, tensors, layout))
    opened: list[str] = []
    read_bytes: list[int] = []
    read_into, open_file = dcp._read_into, checkpoint_files.open_regular

    def counted(file: object, tensor: Tensor) -> None:
        read_bytes.append(tensor.nbytes)
        read_into(file, tensor)  # type: ignore[arg-type]

    def noted(path: Path, most_bytes: int | None = None) -> object:
        opened.append(path.name)
        return open_file(path, most_bytes)

    monkeypatch.setattr(dcp, "_read_into", counted)
    monkeypatch.setattr(checkpoint_files, "open_regular", noted)
    target = {"big": torch.zeros(100, 500)}
    shards = {"big": Shard.whole((1000, 500)).rows(300, 100, ("shard",))}
    checkpoint.load_into(target, shards=shards, strict=False)
    assert torch.equal(target["big"], tensors["big"][300:400])
    assert sum(read_bytes) == 100 * 500 * 4
    assert [name for name in opened if name.endswith(".distcp")] == ["__0_0.distcp"]


def out_of_order(folder: Path, tensor: Tensor) -> Checkpoint:
    """A checkpoint of an earlier version, which stored views as they were."""
    return open_checkpoint(write_earlier(folder, 1, {"w": tensor}))


@pytest.mark.parametrize("small_bytes", [1 << 18, 0])
def test_earlier_checkpoints_with_transposed_tensors_are_read(
    tmp_path: Path, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp, "_SMALL_BYTES", small_bytes)
    tensor = torch.randn(6, 4).T
    checkpoint = out_of_order(tmp_path, tensor)
    target = {"w": torch.zeros(2, 6)}
    checkpoint.load_into(target, shards={"w": Shard((4, 6), (1, 0), (2, 6))})
    assert torch.equal(target["w"], tensor[1:3])


@pytest.mark.parametrize("small_bytes", [1 << 18, 0])
def test_blocks_of_other_dtypes_and_strides_are_filled(
    tmp_path: Path, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp, "_SMALL_BYTES", small_bytes)
    monkeypatch.setattr(dcp, "SLAB_BYTES", 40)
    tensor = torch.randn(7, 5)
    checkpoint = open_checkpoint(save(tmp_path, 1, {"w": tensor}))
    memory = torch.zeros(3, 4, dtype=torch.float64)
    checkpoint.load_into({"w": memory.T[:, :2]}, shards={"w": Shard((7, 5), (2, 1), (4, 2))}, cast=True)
    assert torch.equal(memory.T[:, :2], tensor[2:6, 1:3].double())
    assert not memory[2].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("slab_bytes", [1 << 25, 10_000])
def test_blocks_on_a_gpu_are_written_and_filled(
    tmp_path: Path, slab_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp, "SLAB_BYTES", slab_bytes)
    host = {"w": torch.randn(300, 500), "b": torch.randn(300).bfloat16()}
    device = {name: tensor.cuda() for name, tensor in host.items()}
    checkpoint = open_checkpoint(save_as(tmp_path, 1, device, row_splits(device, 3)))
    shards = {name: Shard.whole(tuple(t.shape)).rows(70, 180, ("shard",)) for name, t in host.items()}
    targets = blank(parts(device, shards))
    checkpoint.load_into(targets, shards=shards)
    assert all(tensor.is_cuda for tensor in targets.values())
    assert_equal({name: tensor.cpu() for name, tensor in targets.items()}, parts(host, shards))


def test_a_shard_of_another_size_than_its_tensor_is_a_mistake(tmp_path: Path) -> None:
    shards = {"w": Shard((4, 2), (0, 0), (2, 2))}
    with pytest.raises(ValueError, match=r"w has shape \(3, 2\) in memory, but its shard has \(2, 2\)"):
        save(tmp_path, 1, {"w": torch.zeros(3, 2)}, shards=shards)
    assert list(tmp_path.iterdir()) == []
