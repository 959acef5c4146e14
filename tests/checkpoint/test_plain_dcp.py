from __future__ import annotations

import pickle
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_writers import Attack, save_alone, save_sharded
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from phalanx.checkpoint.format.manifest import DamagedCheckpointError
from phalanx.checkpoint.format.plain_dcp import PlainCheckpoint, is_plain, open_plain
from phalanx.checkpoint.format.plain_dcp_index import decode_index
from phalanx.core.errors import UserError
from phalanx.core.layout import Shard


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "step-1000"
    save_sharded(path, 3)
    return path


def whole(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(f"{path}.whole.pt", weights_only=True)
    return found


def check_whole(checkpoint: PlainCheckpoint, path: Path) -> None:
    expected = whole(path)
    assert any(name.endswith(".exp_avg_sq") for name in expected)
    read = checkpoint.read(expected)
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name


def test_sharded_model_with_adam(sharded: Path) -> None:
    assert is_plain(sharded)
    checkpoint = open_plain(sharded)
    check_whole(checkpoint, sharded)
    entry = checkpoint.tensors["model.0.weight"]
    assert len(entry.chunks) == 3
    assert len({chunk.file for chunk in entry.chunks}) == 3
    assert entry.dtype == "float32"
    assert checkpoint.tensors["train_state.step"].shape == []
    assert checkpoint.index.paths["train_state.losses"] == ("train_state", "losses") or "train_state.losses.0" in (
        checkpoint.index.paths
    )
    assert checkpoint.other["lr_scheduler.last_epoch"] == 7
    assert checkpoint.other["dataloader.dp_rank_2"] == pickle.dumps({"at": 2})  # bytes, and left as such
    assert not checkpoint.unreadable


def test_async_save(tmp_path: Path) -> None:
    path = tmp_path / "step-5"
    save_sharded(path, 2, background=True)
    check_whole(open_plain(path), path)


def test_into_any_layout(sharded: Path) -> None:
    expected = whole(sharded)["model.0.weight"]
    checkpoint = open_plain(sharded)
    shard = Shard((7, 12), (2, 3), (4, 5))
    part = torch.zeros(4, 5, dtype=torch.float64)
    with pytest.raises(UserError, match=r"model\.0\.weight has dtype float64 here and float32 there"):
        checkpoint.load_into({"model.0.weight": part}, shards={"model.0.weight": shard})
    assert not part.any()
    assert checkpoint.load_into({"model.0.weight": part}, shards={"model.0.weight": shard}, cast=True) == ()
    assert torch.equal(part, expected[2:6, 3:8].double())


def test_what_does_not_fit_is_listed_and_nothing_changed(sharded: Path) -> None:
    checkpoint = open_plain(sharded)
    right = torch.zeros(7, 12)
    with pytest.raises(UserError, match=r"absent is missing; model.0.bias has shape \(8,\) here and \(7,\) there"):
        checkpoint.load_into({"model.0.weight": right, "absent": torch.zeros(1), "model.0.bias": torch.zeros(8)})
    assert not right.any()
    assert checkpoint.load_into({"model.0.weight": right, "absent": torch.zeros(1)}, strict=False) == ("absent",)
    assert right.any()
    with pytest.raises(UserError, match="absent is missing"):
        checkpoint.read(["absent"])


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    dtypes = [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]
    state: dict[str, Any] = {str(dtype): torch.randn(6, 4).abs().to(dtype) for dtype in dtypes}
    state |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "turned": torch.randn(5, 3).T}
    state |= {"columns": torch.randn(300, 700)[:, 3:600], "deep": {"a": [{"b": torch.ones(2)}]}, "none": None}
    save_alone(tmp_path / "all", state)
    checkpoint = open_plain(tmp_path / "all")
    read = checkpoint.read()
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            assert read[name].dtype == tensor.dtype
            same = read[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(*same), name
    assert any(path[:2] == ("deep", "a") for path in checkpoint.index.paths.values())
    assert checkpoint.other["none"] is None


def test_objects_that_are_not_plain_data_are_named_and_not_read(tmp_path: Path) -> None:
    save_alone(tmp_path / "a", {"weight": torch.ones(3), "evil": Attack(f"touch {tmp_path}/ran"), "step": 4})
    checkpoint = open_plain(tmp_path / "a")
    assert checkpoint.other == {"step": 4}
    assert list(checkpoint.unreadable) == ["evil"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_an_index_that_calls_something_is_refused(tmp_path: Path, protocol: int) -> None:
    save_alone(tmp_path / "a", {"weight": torch.ones(3)})
    index = tmp_path / "a" / ".metadata"
    attack = Metadata({}, planner_data=Attack(f"touch {tmp_path}/ran"))
    index.write_bytes(pickle.dumps(attack, protocol=protocol))
    with pytest.raises(UserError, match=r"names [a-z_.]+, which no index of a checkpoint needs: refused") as caught:
        open_plain(tmp_path / "a")
    assert protocol < 2 or "posix.system" in str(caught.value)
    assert not (tmp_path / "ran").exists()
    pickle.loads(index.read_bytes())  # the attack is a real one
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("attack", "named"),
    [
        (b"cbuiltins\neval\n(V1\ntR.", "builtins.eval"),
        (b"ctorch\nload\n(Vx\ntR.", "torch.load"),
        (b"\x80\x04\x8c\x05torch\x8c\x0fSize.__reduce__\x93.", "torch.Size.__reduce__"),
        (b"ctorch.distributed.checkpoint.metadata\nos.system\n(Vtrue\ntR.", "metadata.os.system"),
        (b"cpathlib\nos\n.", "pathlib.os"),
        (b"cbuiltins\ngetattr\n.", "builtins.getattr"),
    ],
)
def test_names_that_are_near(attack: bytes, named: str) -> None:
    with pytest.raises(UserError, match="refused, nothing of it was run") as caught:
        decode_index(attack, Path("x"))
    assert named in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80\x02N.", b"\x80\x02]q\x00.", b"(" * 10000, b"\x80\x04P1\n."])
def test_no_index(content: bytes) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata cannot be read"):
        decode_index(content, Path("x"))


def test_every_cut_and_flipped_index_is_read_or_refused_in_words(sharded: Path) -> None:
    content = (sharded / ".metadata").read_bytes()
    for place in range(0, len(content), 97):
        for changed in (content[:place], content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :]):
            try:
                decode_index(changed, sharded)
            except UserError as error:
                assert str(sharded) in str(error)


def test_files_that_are_missing_or_short(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_alone(path, {"weight": torch.ones(300)})
    file = path / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(DamagedCheckpointError, match=rf"__0_0.distcp has {len(content) - 1} of at least"):
        open_plain(path)
    file.write_bytes(b"x" * len(content))
    with pytest.raises(DamagedCheckpointError, match="weight cannot be read"):
        open_plain(path).read()
    file.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp is missing"):
        open_plain(path)
    with pytest.raises(UserError, match=r"its \.metadata cannot be read"):
        open_plain(tmp_path / "nowhere")


def test_a_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_alone(path, {"weight": torch.ones(3)})
    index = path / ".metadata"
    index.write_bytes(index.read_bytes().replace(b"\x8c\x0c__0_0.distcp", b"\x8c\x0c../../passwd"))
    with pytest.raises(DamagedCheckpointError, match="which is no file of this folder"):
        open_plain(path)


def test_the_index_needs_no_torch() -> None:
    code = "import sys, phalanx.checkpoint.format.plain_dcp_index; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def _nested(times: int) -> bytes:
    """A tuple that holds the one before twice, and so on."""
    return b"\x80\x04)" + b"q\xffh\xff\x86" * times


HOSTILE = {
    "a place of the memo far away": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "2 GB of bytes": b"\x80\x04\x8e\x00\x00\x00\x80\x00\x00\x00\x00.",
    "2 GB of an array": b"\x80\x05\x96\x00\x00\x00\x80\x00\x00\x00\x00.",
    "2 GB of text": b"\x80\x04\x8d\x00\x00\x00\x80\x00\x00\x00\x00.",
    "4 GB of text": b"\x80\x02X\xff\xff\xff\xff.",
    "a frame of 2 GB": b"\x80\x04\x95\x00\x00\x00\x80\x00\x00\x00\x00N.",
    "a number of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "a long number": b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".",
    "a number as text": b"\x80\x02L" + b"9" * 4000 + b"L\n.",
    "buffers from outside": b"\x80\x05\x97.",
    "a persistent name": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "a key that holds itself 2^60 times": b"\x80\x04}" + _nested(60)[2:] + b"Ns.",
    "a key that is nested too deep": b"\x80\x04})" + b"\x85" * 200_000 + b"Ns.",
    "2^60 empty tuples": _nested(60) + b".",
    "the top of the stack twice": b"\x80\x04N2.",
    "nothing but nesting": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "marks without an end": b"\x80\x04" + b"(" * 100_000 + b".",
    "values without an end": b"\x80\x04" + b"N" * 100_000 + b".",
    "its own class set": b"\x80\x02ctorch\nSize\nN}X\x07\x00\x00\x00__new__X\x04\x00\x00\x00gones\x86b.",
    "a dtype called": b"\x80\x02ctorch\nfloat32\n)R.",
    "text called": b"\x80\x04\x8c\x04Size)R.",
    "a name of 100 kB": b"\x80\x02c" + b"a" * 100_000 + b"\nb\n.",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_few_bytes_take_no_memory_and_no_time(what: str) -> None:
    content = HOSTILE[what]
    tracemalloc.start()
    began_s = time.process_time()
    try:
        with pytest.raises(UserError):
            decode_index(content, Path("x"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 * len(content) + 100_000
    assert time.process_time() - began_s < 5


def test_names_that_hold_themselves_are_not_written_out() -> None:
    """In an error's text, a table that is short in the file may be endless."""
    index = Metadata({}, storage_data={MetadataIndex("w", (0,)): _StorageInfo("FILE", 0, 1)})
    content = pickle.dumps(index, protocol=2).replace(b"X\x04\x00\x00\x00FILE", _nested(60)[2:])
    with pytest.raises(DamagedCheckpointError, match="names 'tuple', which is no file"):
        decode_index(content, Path("x"))


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_what_is_packed_is_not_unpacked(tmp_path: Path, size: int) -> None:
    """torch never packs; 260 kB of a packed archive would become 256 MB."""
    save_alone(tmp_path / "a", {"weight": torch.ones(size), "count": 3})
    checkpoint = open_plain(tmp_path / "a")
    for chunk in (checkpoint.tensors["weight"].chunks[0], checkpoint.index.others["count"]):
        path = tmp_path / "a" / chunk.file
        content = bytearray(path.read_bytes())
        archive = bytes(content[chunk.offset : chunk.offset + chunk.length])
        place = archive.index(b"PK\x01\x02")
        content[chunk.offset + place + 10] = 8  # the first entry of the directory is said to be deflated
        path.write_bytes(content)
    with pytest.raises((ValueError, DamagedCheckpointError), match="is packed"):
        checkpoint.read()
    assert "is packed" in checkpoint.unreadable["count"]


def test_more_elements_than_bytes_are_refused_before_memory_is_taken() -> None:
    size = torch.Size([1 << 40])
    described = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32), size, [ChunkStorageMetadata(torch.Size([0]), size)]
    )
    places = {MetadataIndex("w", (0,)): _StorageInfo("__0_0.distcp", 0, 1000)}
    with pytest.raises(DamagedCheckpointError, match="a chunk has fewer bytes than elements"):
        decode_index(pickle.dumps(Metadata({"w": described}, storage_data=places)), Path("x"))
