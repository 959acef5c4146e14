"""Restoring from durable storage: what is read is checked, and every byte of a distinct shard is read once."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import rewrite
from restoring_helpers import (
    CountingStore,
    Host,
    groups,
    parts_of,
    restore_all,
    save_durable,
    shards_of,
    some_tensors,
    take,
)
from support.parity.places import in_threads
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroupGloo

from phalanx.checkpoint.format.manifest import Meta
from phalanx.checkpoint.format.shard_plan import aligned
from phalanx.checkpoint.restoring.restore import restore
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import advance, claim
from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.ipc.tree_peers import TreePeers
from phalanx.parallel.group import Group
from phalanx.parallel.mesh import GroupCopies

SCALE = 128
"""Rows of 0.8 MB, 0.3 MB of columns and 1 MB of flat state, so that archives are read in runs of rows."""


def data_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


def beside_bytes(path: Path) -> int:
    """Of what is checked by one of the ranks, and not read into anything."""
    return sum(file.stat().st_size for file in [path / ".metadata", *path.glob("part-*.json")])


def run_bytes(path: Path, chunk: dict[str, Any]) -> int:
    """Of an archive and of the gap behind it, which have one sum."""
    end = min(aligned(chunk["offset"] + chunk["length"]), (path / chunk["file"]).stat().st_size)
    return int(end - chunk["offset"])


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_distinct_shard_is_read_once(tmp_path: Path, size: int, tensor: int) -> None:
    layout, tensors = Layout(replicate=size, tensor=tensor), some_tensors(SCALE)
    path, store = save_durable(tmp_path, tensors, layout, 3), CountingStore(tmp_path)
    copies = groups(layout, "replicate")
    outcomes = restore_all(tensors, layout, folder=store, copies=copies)
    restored = outcomes[0].restored
    assert restored is not None and restored.source == "durable" and restored.name == "step-00000003"
    assert restored.state == {"step": 3} and outcomes[0].lines == []
    # What no axis splits is read by the group of every tensor rank: it is a distinct shard of each of them.
    entries = json.loads((path / "manifest.json").read_text())["tensors"]
    unsplit = ("model.norm", "optim.step", "optim.flags", "rng.cpu")
    again = sum(run_bytes(path, chunk) for name in unsplit for chunk in entries[name]["chunks"]) * (tensor - 1)
    beside = beside_bytes(path)
    assert store.read_bytes == restored.bytes_by_kind["durable"] == data_bytes(path) + again + beside


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_writer_many_readers(tmp_path: Path, size: int) -> None:
    tensors = some_tensors(SCALE)
    path, store = save_durable(tmp_path, tensors, Layout(), 3), CountingStore(tmp_path)
    layout = Layout(replicate=size)
    restore_all(tensors, layout, folder=store, copies=groups(layout, "replicate"))
    # The flat state is split among the members here and not in the file: each reads the runs that it needs part
    # of; all else is read once.
    flat = tensors["optim.flat"].nbytes
    beside = beside_bytes(path)
    assert store.read_bytes - data_bytes(path) - beside <= (size - 1) * (flat + 2048)


def test_without_groups_every_rank_reads_for_itself(tmp_path: Path) -> None:
    layout, tensors = Layout(replicate=2), some_tensors(SCALE)
    path, store = save_durable(tmp_path, tensors, layout, 3), CountingStore(tmp_path)
    restore_all(tensors, layout, folder=store)
    assert data_bytes(path) < store.read_bytes < 2 * data_bytes(path)


@pytest.mark.parametrize(
    "after", [Layout(), Layout(replicate=3), Layout(tensor=4), Layout(replicate=2, tensor=2)], ids=str
)
@pytest.mark.parametrize("before", [Layout(), Layout(replicate=4, tensor=2), Layout(tensor=3)], ids=str)
def test_any_layout_goes_into_any_other(tmp_path: Path, before: Layout, after: Layout) -> None:
    tensors = some_tensors(64)
    save_durable(tmp_path, tensors, before, 3)
    for copies in (None, groups(after, "replicate")):
        for outcome in restore_all(tensors, after, folder=tmp_path, copies=copies):
            assert outcome.restored is not None and outcome.lines == []


def test_what_is_given_to_others_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, tensors = Layout(replicate=2), some_tensors(SCALE)
    tensors["optim.transposed"] = torch.randn(300, 200).T  # restored into memory in another order
    tensors["model.wide"] = torch.randn(3, 50_000).T
    save_durable(tmp_path, tensors, layout, 3)
    for bucket_bytes in (64 << 20, 1 << 16, 64):
        monkeypatch.setattr("phalanx.checkpoint.restoring.source.BUCKET_BYTES", bucket_bytes)
        copies = groups(layout, "replicate")
        assert restore_all(tensors, layout, folder=tmp_path, copies=copies)[0].restored is not None


def test_every_flipped_bit_of_what_is_read_is_found_and_an_older_one_used(tmp_path: Path) -> None:
    layout, old, tensors = Layout(replicate=2), some_tensors(seed=1), some_tensors(seed=2)
    save_durable(tmp_path, old, layout, 1)
    path, chance = save_durable(tmp_path, tensors, layout, 2), random.Random(0)
    for _ in range(50):
        file = chance.choice(sorted(path.glob("*.distcp")))
        good = file.read_bytes()
        content = bytearray(good)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
        outcomes = restore_all(old, layout, folder=tmp_path, copies=groups(layout, "replicate"))
        assert all(outcome.restored is not None and outcome.restored.step == 1 for outcome in outcomes)
        [line] = outcomes[0].lines
        assert line.startswith(f"checkpoint step-00000002 is damaged ({file.name}: bytes ")
        file.write_bytes(good)


def test_a_checkpoint_without_sums_of_runs_is_hashed_before_it_is_believed(tmp_path: Path) -> None:
    layout, old, tensors = Layout(replicate=2), some_tensors(seed=1), some_tensors(seed=2)
    save_durable(tmp_path, old, layout, 1)
    path = save_durable(tmp_path, tensors, layout, 2)

    def forget(tree: dict[str, Any]) -> None:
        for file in tree["files"]:
            file.pop("sums", None)

    rewrite(path, forget)
    assert restore_all(tensors, layout, folder=tmp_path)[0].lines == []
    file = path / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    outcomes = restore_all(old, layout, folder=tmp_path)
    expected = (
        "checkpoint step-00000002 is damaged (__1_0.distcp: does not match its checksum); trying the one before it"
    )
    assert outcomes[0].lines == [expected]


def test_truncated_deleted_swapped_and_torn_checkpoints_are_passed_over(tmp_path: Path) -> None:
    layout, tensors = Layout(replicate=2), some_tensors(seed=1)
    for step in range(1, 6):
        save_durable(tmp_path, tensors if step == 1 else some_tensors(seed=step), layout, step)
    paths = [tmp_path / f"step-{step:08d}" for step in range(6)]
    (paths[5] / "__0_0.distcp").unlink()
    with (paths[4] / "__1_0.distcp").open("r+b") as file:
        file.truncate(100)
    (paths[2] / "__0_0.distcp").rename(tmp_path / "aside")
    (paths[3] / "__0_0.distcp").rename(paths[2] / "__0_0.distcp")
    (tmp_path / "aside").rename(paths[3] / "__0_0.distcp")
    outcomes = restore_all(tensors, layout, folder=tmp_path)
    assert outcomes[0].restored is not None and outcomes[0].restored.step == 1
    reasons = ["__0_0.distcp is missing", "__1_0.distcp has 100 of its", "__0_0.distcp: bytes", "__0_0.distcp: bytes"]
    for step, reason, line in zip((5, 4, 3, 2), reasons, outcomes[0].lines, strict=True):
        assert f"checkpoint step-{step:08d} is damaged ({reason}" in line


def test_sums_are_those_of_the_bytes(tmp_path: Path) -> None:
    path = save_durable(tmp_path, some_tensors(), Layout(), 1)
    for entry in json.loads((path / "manifest.json").read_text())["files"]:
        content = (path / entry["name"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        assert bool(entry.get("sums")) == entry["name"].endswith(".distcp")


def test_attempt_counts_before_step(tmp_path: Path) -> None:
    tensors = some_tensors(seed=1)
    host = Host("a")
    save_durable(tmp_path, some_tensors(seed=2), Layout(), 9, Meta(attempt=1))
    take(some_tensors(seed=3), Layout(), 12, [host], attempt=1)
    take(tensors, Layout(), 5, [host], attempt=2)
    [outcome] = restore_all(tensors, Layout(), [host], tmp_path)
    assert outcome.restored is not None and (outcome.restored.attempt, outcome.restored.step) == (2, 5)


def test_of_the_same_step_memory_goes_first(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = some_tensors(seed=1)
    host = Host("a")
    save_durable(tmp_path, tensors, Layout(), 5)
    take(tensors, Layout(), 5, [host])
    [outcome] = restore_all(tensors, Layout(), [host], tmp_path)
    assert outcome.restored is not None and outcome.restored.source == "memory"
    save_durable(tmp_path, tensors, Layout(), 6)
    [outcome] = restore_all(tensors, Layout(), [host], tmp_path)
    assert outcome.restored is not None and outcome.restored.source == "durable" and outcome.restored.step == 6


def test_what_the_pointer_does_not_know_is_not_used(tmp_path: Path) -> None:
    tensors, store = some_tensors(seed=1), LocalStore(tmp_path)
    path = save_durable(tmp_path, tensors, Layout(), 5)
    save_durable(tmp_path, some_tensors(seed=2), Layout(), 8)
    digest = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    advance(store, claim(store), 5, path.name, digest)
    [outcome] = restore_all(tensors, Layout(), folder=store)
    assert outcome.restored is not None and outcome.restored.step == 5
    assert outcome.restored.refusals == tuple(outcome.lines)
    [line] = outcome.lines
    assert line.startswith("checkpoint step-00000008 was not published by the attempt in charge")
    save_durable(tmp_path, some_tensors(seed=3), Layout(), 5)  # by somebody else, under the same name
    with pytest.raises(UserError, match=r"no good state is left.*is another than the one that was published last"):
        restore_all(tensors, Layout(), folder=store)


def test_storage_that_cannot_be_read(tmp_path: Path) -> None:
    class Broken(LocalStore):
        def names(self) -> list[str]:
            raise OSError(5, "Input/output error")

    tensors, host = some_tensors(seed=1), Host("a")
    with pytest.raises(UserError, match=r"checkpoints cannot be listed \(Input/output error\)"):
        restore_all(tensors, Layout(), folder=Broken(tmp_path))
    take(tensors, Layout(), 5, [host])
    [outcome] = restore_all(tensors, Layout(), [host], Broken(tmp_path))
    assert outcome.restored is not None and outcome.restored.source == "memory"
    assert outcome.lines == ["checkpoints cannot be listed (Input/output error); restoring from memory"]


def test_over_real_groups(tmp_path: Path) -> None:
    layout, tensors = Layout(replicate=2, tensor=2), some_tensors(SCALE)
    path = save_durable(tmp_path, tensors, layout, 3)

    def group(ranks: Sequence[int], rank: int, store: Any) -> Group:
        index, size = list(ranks).index(rank), len(ranks)
        own = PrefixStore("-".join(map(str, ranks)), store)
        return Group(ranks, index, lambda: ProcessGroupGloo(own, index, size, timedelta(seconds=60)))

    def body(rank: int, store: Any) -> int:
        replicas = group(layout.members(rank, ("replicate",)), rank, store)
        peers = TreePeers(store, rank, layout.world_size, host="127.0.0.1", name="here", timeout_s=60.0)
        shards = shards_of(layout, rank, tensors)
        expected = parts_of(tensors, shards)
        targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        restored = restore(
            targets,
            keeper=None,
            store=LocalStore(tmp_path),
            report=pytest.fail,
            shards=shards,
            peers=peers,
            copies=GroupCopies(replicas, ("replicate",), torch.device("cpu")),
        )
        assert restored is not None
        assert all(torch.equal(targets[name], tensor) for name, tensor in expected.items())
        peers.close()
        replicas.forget()
        return restored.bytes_by_kind["durable"]

    read = in_threads(layout, body)
    assert len(set(read)) == 1 and data_bytes(path) <= read[0] < 1.05 * data_bytes(path)
