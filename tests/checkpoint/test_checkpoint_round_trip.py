from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_helpers import assert_equal, blank, forge, make_tensors
from support.open_checkpoint import newest, open_checkpoint
from torch import Tensor

from phalanx.checkpoint.format.checkpoint_files import FolderFiles
from phalanx.checkpoint.format.dcp import held
from phalanx.checkpoint.format.manifest import Meta, config_sha256
from phalanx.checkpoint.restoring.compatibility import read_items
from phalanx.checkpoint.restoring.durable_source import DurableSource
from phalanx.checkpoint.session.blocking_session import save
from phalanx.core.errors import UserError

STATE = {"loader": {"samples": 4096}, "losses": [1.5, 0.1 + 0.2], "name": "Ünïcode", "none": None, "done": False}


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = save(tmp_path / "checkpoints", 12, tensors, STATE, Meta({"train": {"steps": 100}}, attempt=3))
    assert path == tmp_path / "checkpoints" / "step-00000012"
    found = newest(tmp_path / "checkpoints", pytest.fail)
    assert found is not None
    assert found.path == path
    assert found.step == 12
    assert found.state == STATE
    targets = blank(tensors)
    differences = found.load_into(targets)
    assert differences.missing == differences.unexpected == ()
    assert_equal(targets, tensors)
    assert_equal(found.read(), tensors)


def test_state_keeps_floats_that_are_not_finite_and_integers_of_any_size(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {}, {"best": float("inf"), "last": float("nan"), "key": 2**100})
    state = open_checkpoint(path).state
    assert state["best"] == float("inf")
    assert state["last"] != state["last"]
    assert state["key"] == 2**100


def test_manifest_says_where_it_comes_from(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    config = {"b": 1, "a": {"c": [1, 2]}}
    path = save(tmp_path, 7, tensors, meta=Meta(config, attempt=2))
    tree = json.loads((path / "manifest.json").read_text())
    assert (tree["format_version"], tree["step"], tree["attempt"]) == (1, 7, 2)
    assert tree["config"] == config
    assert tree["config_sha256"] == config_sha256({"a": {"c": [1, 2]}, "b": 1})
    assert tree["torch_version"] == torch.__version__
    entry = tree["tensors"]["model.norm"]
    assert (entry["dtype"], entry["shape"]) == ("bfloat16", [5])
    chunk = entry["chunks"][0]
    stored = (path / chunk["file"]).read_bytes()[chunk["offset"] : chunk["offset"] + chunk["length"]]
    assert tensors["model.norm"].view(torch.int16).numpy().tobytes() in stored


def test_views_are_stored_without_their_base(tmp_path: Path) -> None:
    base = torch.zeros(1000, 1000)
    path = save(tmp_path, 1, {"row": base[3]})
    assert sum(file.stat().st_size for file in path.iterdir()) < 20_000


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_dcp_reads_it(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = save(tmp_path, 1, tensors)
    targets = blank(tensors)
    dcp.load(targets, checkpoint_id=path, no_dist=True)
    assert_equal(targets, tensors)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum from coreutils")
def test_coreutils_verify_it(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    path = save(tmp_path, 1, tensors)
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    assert subprocess.run(command, cwd=path, capture_output=True, check=False).returncode == 0
    listed = {line.split()[1] for line in (path / "SHA256SUMS").read_text().splitlines()}
    assert listed == {file.name for file in path.iterdir()} - {"SHA256SUMS"}


def test_reading_is_strict_about_names_shapes_and_dtypes(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    checkpoint = open_checkpoint(save(tmp_path, 1, tensors))
    targets = blank(tensors)
    del targets["model.norm"]
    targets["model.extra"] = torch.zeros(1)
    targets["rng.cpu"] = torch.zeros(3, dtype=torch.uint8)
    targets["optim.bad_steps"] = torch.tensor(0.0)
    with pytest.raises(UserError) as refused:
        checkpoint.load_into(targets)
    text = str(refused.value)
    assert "1 missing in the checkpoint: model.extra" in text
    assert "1 only in the checkpoint: model.norm" in text
    assert f"rng.cpu has shape (3,) here and {tuple(tensors['rng.cpu'].shape)} in the checkpoint" in text
    assert "optim.bad_steps has dtype float32 here and int64 in the checkpoint" in text
    assert all(not tensor.any() for tensor in targets.values()), "something was loaded although it was refused"


def test_reading_loosely_fills_what_is_on_both_sides(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    checkpoint = open_checkpoint(save(tmp_path, 1, tensors))
    targets = {"model.norm": torch.zeros(5, dtype=torch.bfloat16), "model.extra": torch.zeros(1)}
    differences = checkpoint.load_into(targets, strict=False)
    assert differences.missing == ("model.extra",)
    assert set(differences.unexpected) == set(tensors) - {"model.norm"}
    assert torch.equal(targets["model.norm"], tensors["model.norm"])
    assert not targets["model.extra"].any()


def test_reading_converts_only_when_told(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    checkpoint = open_checkpoint(save(tmp_path, 1, tensors))
    target = {"model.norm": torch.zeros(5)}
    with pytest.raises(UserError, match="has dtype float32 here and bfloat16"):
        checkpoint.load_into(target, strict=False)
    checkpoint.load_into(target, strict=False, cast=True)
    assert torch.equal(target["model.norm"], tensors["model.norm"].float())


def test_a_long_list_of_names_is_cut(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, 1, {f"t{i:03d}": torch.zeros(1) for i in range(50)}))
    with pytest.raises(UserError, match=r"50 only in the checkpoint: t000, .*t007 and 42 more"):
        checkpoint.load_into({})


def test_reading_an_unknown_name_says_so(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, 1, {"a": torch.zeros(1)}))
    with pytest.raises(UserError, match="1 missing in the checkpoint: b"):
        checkpoint.read(["a", "b"])


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent", pytest.fail) is None
    assert newest(tmp_path, pytest.fail) is None


@pytest.mark.parametrize(
    ("state", "place"),
    [({"a": {1: 2}}, "state.a has the key 1"), ({"a": [torch.zeros(1)]}, "state.a.0 is a Tensor")],
)
def test_state_that_json_would_change_is_refused_before_anything_is_written(
    tmp_path: Path, state: object, place: str
) -> None:
    with pytest.raises(TypeError, match=place):
        save(tmp_path, 1, {}, state)
    assert list(tmp_path.iterdir()) == []


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 5, make_tensors(1), {"attempt": 1})
    save(tmp_path, 5, make_tensors(2), {"attempt": 2})
    found = newest(tmp_path, pytest.fail)
    assert found is not None
    assert found.state == {"attempt": 2}
    assert_equal(found.read(), make_tensors(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_chunks_of_several_files_are_put_together(tmp_path: Path) -> None:
    """One tensor in two boxes side by side, which no run of rows can fill."""
    path = save(tmp_path, 1, {"left": torch.arange(6.0).reshape(2, 3), "right": torch.arange(6.0, 10.0).reshape(2, 2)})
    manifest = open_checkpoint(path).manifest
    left, right = manifest.tensors["left"].chunks[0], manifest.tensors["right"].chunks[0]
    chunks = [left, right.model_copy(update={"offsets": [0, 3]})]
    whole = manifest.tensors["left"].model_copy(update={"shape": [2, 5], "chunks": chunks})
    target = torch.zeros(2, 5)
    source = DurableSource(FolderFiles(path), manifest.model_copy(update={"tensors": {"whole": whole}}), verify=False)
    assert source.read(read_items(source.tensors, held({"whole": target}, {}))).faults == []
    assert target.tolist() == [[0, 1, 2, 6, 7], [3, 4, 5, 8, 9]]


class _Trap:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


def test_a_malicious_metadata_pickle_is_not_opened(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    sprung = tmp_path / "sprung"
    path = save(tmp_path / "checkpoints", 1, tensors)
    forge(path, {".metadata": pickle.dumps(_Trap(sprung))})
    checkpoint = newest(tmp_path / "checkpoints", pytest.fail)
    assert checkpoint is not None
    targets = blank(tensors)
    checkpoint.load_into(targets)
    assert_equal(targets, tensors)
    assert not sprung.exists()
    with contextlib.suppress(AttributeError):
        dcp.FileSystemReader(path).read_metadata()
    assert sprung.exists(), "the trap does not work, so the test above shows nothing"


def test_a_malicious_pickle_in_place_of_a_tensor_is_not_run(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    path = save(tmp_path / "checkpoints", 1, {"weight": torch.zeros(4)})
    chunk = open_checkpoint(path).manifest.tensors["weight"].chunks[0]
    trap = tmp_path / "trap.pt"
    torch.save(_Trap(sprung), trap)
    forge(path, {chunk.file: trap.read_bytes()}, lengths={"weight": trap.stat().st_size})
    checkpoint = open_checkpoint(path)
    with pytest.raises(UserError, match="its tensors cannot be read"):
        checkpoint.load_into({"weight": torch.zeros(4)})
    assert not sprung.exists()
    torch.load(trap, weights_only=False)
    assert sprung.exists(), "the trap does not work, so the test above shows nothing"
