# ruff: noqa: F811  (the fixture `run` is imported)
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.open_checkpoint import open_checkpoint

from phalanx.checkpoint.format.manifest import Meta
from phalanx.checkpoint.session.blocking_session import save
from phalanx.core.errors import UserError

from checkpoint_runs import call, call_json, checkpoint, damage, make_tensors, run  # noqa: F401  # isort: skip
from checkpoint_helpers import forge, rewrite
from plain_writers import save_alone


def test_ls(run: Path) -> None:
    (checkpoint(run, 100) / "manifest.json").unlink()
    shutil.rmtree(checkpoint(run, 200))
    save(run / "checkpoints", 300, make_tensors())
    save(run / "checkpoints", 150, make_tensors())
    checkpoint(run, 150).rename(checkpoint(run, 150).with_name("sick-step-00000150.a1-0f"))
    lines = call("ls", run).output.splitlines()
    assert lines[1].split()[0] == "step-00000300"
    assert lines[1].split()[-1] == "latest"
    assert "KiB" in lines[1]
    assert "damaged: manifest.json is missing" in lines[2]
    assert lines[3].split()[0] == "sick-step-00000150.a1-0f"
    assert lines[3].split()[-1] == "sick"
    assert call("list", run).output.splitlines()[1].split()[0] == "step-00000300"


def test_ls_as_json(run: Path) -> None:
    def tell(tree: dict[str, Any]) -> None:
        tree.update(layout="pp2·dp4", metrics={"validation_loss": 2.5})

    rewrite(checkpoint(run, 200), tell)
    damage(run, 100)
    rows = call_json("ls", run)
    assert [row["name"] for row in rows] == ["step-00000200", "step-00000100"]
    assert [row["status"] for row in rows] == ["latest", "whole"]  # contents are not read
    assert rows[0]["step"] == 200
    assert rows[0]["attempt"] == 2
    assert rows[0]["layout"] == "pp2·dp4"
    assert rows[0]["metrics"] == {"validation_loss": 2.5}
    assert 0 <= rows[0]["age_s"] < 3600
    assert rows[0]["size_bytes"] > 4800
    assert "validation_loss=2.5" in call("ls", run).output


def test_show_the_newest_of_a_run(run: Path) -> None:
    for name in ("show", "inspect"):
        output = call(name, run).output
        for text in ("model.head", "30 x 40", "bfloat16", "1,200", "step-00000200", "by attempt 2", "samples"):
            assert text in output


def test_show_prints_config_and_state_as_json(run: Path) -> None:
    assert json.loads(call("show", checkpoint(run, 100), "--config").output) == {"seed": 1}
    assert json.loads(call("show", checkpoint(run, 100), "--state").output) == {"samples": 800}


def test_health(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1500, 1000, generator=generator) * 3 + 100  # more than are looked at together
    bad = torch.tensor([1.0, float("nan"), 3.0, float("inf"), -float("inf")])
    tensors = {"values": values, "bad": bad, "empty": torch.empty(0), "count": torch.tensor(7), "nan": bad[1:2].clone()}
    save(tmp_path, 1, tensors)
    found = {name: entry["health"] for name, entry in call_json("show", tmp_path, "--health")["tensors"].items()}
    assert found["values"]["not_finite"] == 0
    assert found["values"]["mean"] == pytest.approx(float(values.double().mean()), rel=1e-12)
    assert found["values"]["std"] == pytest.approx(float(values.double().std(correction=0)), rel=1e-9)
    assert found["values"]["min"] == float(values.min())
    assert found["values"]["max"] == float(values.max())
    assert found["bad"] == {"not_finite": 3, "min": 1.0, "max": 3.0, "mean": 2.0, "std": 1.0}
    assert found["count"]["mean"] == 7
    assert found["empty"] == {"not_finite": 0, "min": None, "max": None, "mean": None, "std": None}
    assert found["nan"]["min"] is None
    assert "4 numbers are not finite, in bad, nan" in call("show", tmp_path, "--health").output


def test_verify(run: Path) -> None:
    result = call("verify", run)
    assert result.exit_code == 0
    assert result.output.count("whole (") == 2
    damage(run, 200)
    result = call("verify", run)
    assert result.exit_code == 1
    assert "step-00000200: damaged: __0_0.distcp" in result.output
    assert "step-00000100: whole" in result.output
    assert call("verify", checkpoint(run, 100)).exit_code == 0


def test_verify_sees_what_checksums_do_not(run: Path) -> None:
    content = (checkpoint(run, 200) / "__0_0.distcp").read_bytes()
    forge(checkpoint(run, 200), {"__0_0.distcp": b"XX" + content[2:]})
    assert "__0_0.distcp: no archive of a tensor at byte 0" in call("verify", run).output
    save(run / "checkpoints", 300, {"model.norm": torch.zeros(6)})
    index = (checkpoint(run, 300) / ".metadata").read_bytes()
    forge(checkpoint(run, 100), {".metadata": index})
    output = call("verify", checkpoint(run, 100)).output
    assert "damaged: .metadata says something else of model.head than its manifest" in output


@pytest.mark.parametrize("name", ["ls", "list", "show", "inspect", "verify"])
def test_nothing_there_is_a_user_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="there is no checkpoint here; give a run folder"):
        call(name, tmp_path)
    with pytest.raises(UserError, match="there is no such folder"):
        call(name, tmp_path / "absent")


def test_diff_of_the_same(run: Path) -> None:
    result = call("diff", checkpoint(run, 200), run)
    assert result.exit_code == 0
    assert "the same: 2 equal tensors" in result.output


def test_diff(run: Path) -> None:
    tensors = make_tensors()
    tensors["model.head"][3, 5] += 0.5
    tensors["model.head"][7, 7] = -1.5
    tensors["model.new"] = torch.ones(2)
    tensors["model.norm"] = torch.zeros(6)
    save(run / "checkpoints", 300, tensors, {"samples": 1600, "epoch": 1}, Meta({"seed": 2, "lr": {"max": 0.1}}))
    result = call("diff", checkpoint(run, 200), run)
    assert result.exit_code == 1
    rows = {line.split()[0]: line.split()[1:] for line in result.output.splitlines() if line}
    assert rows["model.head"] == ["values", "2", "of", "1,200", "2.5", "2.5"]
    assert rows["model.new"] == ["only", "in", "B"]
    assert "shape [5] -> [6]" in result.output
    assert rows["seed"] == ["1", "2"]
    assert rows["lr.max"] == ["0.1"]
    found = call_json("diff", checkpoint(run, 200), run)
    assert found["changed"] == {"model.head": {"elements": 1200, "differing": 2, "max_abs": 2.5, "relative": 2.5}}
    assert found["only_b"] == ["model.new"]
    assert found["state"] == {"epoch": [None, 1]}
    assert not found["same"]
    assert call_json("diff", run, checkpoint(run, 200), "--tensors-only")["config"] == {}


def test_diff_of_numbers_that_are_not_finite_and_of_large_integers(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    left = {"same": torch.tensor([nan, inf, 1.0]), "signs": torch.tensor([inf, 1.0]), "big": torch.tensor(2**60)}
    right = {"same": torch.tensor([nan, inf, 1.0]), "signs": torch.tensor([-inf, 1.0]), "big": torch.tensor(2**60 + 1)}
    left["wide"], right["wide"] = torch.arange(6.0), torch.arange(6.0).bfloat16()
    save(tmp_path / "a", 1, left)
    save(tmp_path / "b", 1, right)
    found = call_json("diff", tmp_path / "a", tmp_path / "b")
    assert found["equal"] == 1
    assert found["changed"].keys() == {"signs", "big"}
    assert found["changed"]["signs"]["max_abs"] == 0
    assert found["recast"] == {"wide": ["float32", "bfloat16"]}


def test_diff_names_the_damaged_one(run: Path) -> None:
    content = (checkpoint(run, 100) / "__0_0.distcp").read_bytes()
    forge(checkpoint(run, 100), {"__0_0.distcp": b"X" * len(content)})
    with pytest.raises(UserError, match=r"step-00000100: is damaged: model\.\w+ cannot be read"):
        call("diff", checkpoint(run, 200), checkpoint(run, 100))


@pytest.mark.parametrize("files", [1, 3])
def test_convert_into_other_files(run: Path, files: int) -> None:
    (run / "config.json").write_text("{}")
    (run / "tokenizer").mkdir()
    (run / "tokenizer" / "kind").write_text("bytes")
    target = run / "target"
    result = call("convert", run, target, "--files", files)
    assert f"in {min(files, 2)} files" in result.output  # two tensors
    assert call("diff", run, target).exit_code == 0
    assert call("verify", target).exit_code == 0
    assert (target / "tokenizer" / "kind").read_text() == "bytes"
    made = open_checkpoint(checkpoint(target, 200))
    assert made.state == {"samples": 1600}
    assert made.manifest.attempt == 2
    with pytest.raises(UserError, match="holds checkpoints already; name a new folder"):
        call("convert", run, target)


def test_convert_large_tensors_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.checkpoint.format.stored_tensors.CHUNK_BYTES", 1000)
    tensors = {"wide": torch.randn(3, 700), "tall": torch.randn(900, 2), "cube": torch.randn(5, 6, 7).double()}
    save(tmp_path / "a", 3, tensors)
    call("convert", tmp_path / "a", tmp_path / "b", "--files", 2)
    made = open_checkpoint(tmp_path / "b" / "step-00000003")
    assert all(torch.equal(made.read()[name], tensor) for name, tensor in tensors.items())
    sizes = [file.size_bytes for file in made.manifest.files if file.name.startswith("__")]
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes)
    assert len(made.manifest.tensors["wide"].chunks) == 9


def test_convert_to_rounded_weights(run: Path) -> None:
    save(run / "checkpoints", 300, make_tensors() | {"optim.head": torch.ones(3), "model.ids": torch.tensor([1, 2])})
    with pytest.raises(UserError, match="add --weights-only"):
        call("convert", run, run / "t", "--dtype", "bfloat16")
    call("convert", run, run / "t", "--dtype", "bfloat16", "--weights-only")
    read = open_checkpoint(run / "t" / "step-00000300").read()
    assert {name: tensor.dtype for name, tensor in read.items()} == {
        "model.norm": torch.bfloat16,
        "model.head": torch.bfloat16,
        "model.ids": torch.int64,
    }
    with pytest.raises(UserError, match="holds no weights"):
        save(run / "other", 1, {"optim.head": torch.ones(3)} | {"model.x": torch.ones(1)})
        save(run / "none", 1, {"optim.head": torch.ones(3)})
        call("convert", run / "none", run / "u", "--weights-only")


def test_a_damaged_checkpoint_is_not_converted(run: Path) -> None:
    damage(run, 200)
    with pytest.raises(UserError, match="step-00000200: is damaged"):
        call("convert", checkpoint(run, 200), run / "t")
    assert not (run / "t").exists() or not list((run / "t").iterdir())


def test_plain_checkpoints(tmp_path: Path) -> None:
    state = {
        "layers": {"0.wq": torch.randn(4, 4)},
        "optimizer": {"m": torch.randn(3)},
        "train_state": {"step": torch.tensor(12)},
        "when": {"now": 3},
        "raw": b"pickled",
    }
    plain = tmp_path / "step-10"
    save_alone(plain, state)
    assert "plain DCP, without checksums" in call("show", plain).output
    assert call("verify", plain).output == (
        "step-10: 3 chunks are where its index says; plain DCP has no checksums to compare with\n"
    )
    result = call("convert", plain, tmp_path / "ours")
    assert "left out raw: bytes has no place in JSON" in result.output
    made = open_checkpoint(tmp_path / "ours" / "step-00000012")
    assert torch.equal(made.read()["layers.0.wq"], state["layers"]["0.wq"])
    assert made.state == {"dcp": {"when.now": 3}}
    assert call("diff", plain, tmp_path / "ours", "--tensors-only").exit_code == 0
    call("convert", plain, tmp_path / "weights", "--weights-only", "--step", 5)
    assert list(open_checkpoint(tmp_path / "weights" / "step-00000005").manifest.tensors) == ["layers.0.wq"]
    (plain / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match=r"__0_0\.distcp is missing"):
        call("convert", plain, tmp_path / "again")


def test_plain_checkpoint_without_a_step(tmp_path: Path) -> None:
    save_alone(tmp_path / "model", {"weight": torch.ones(2)})
    with pytest.raises(UserError, match="does not say how many steps were done; give --step"):
        call("convert", tmp_path / "model", tmp_path / "ours")


_PEAK = """
import re, sys
from pathlib import Path
from click.testing import CliRunner
from phalanx.cli.checkpoint_command import command
def call(*arguments):
    result = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
small, large, target = sys.argv[1:]
for name, out in ((small, target + "-small"), (large, target)):
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = peak()
    call("convert", name, out, "--files", "2")
    call("diff", name, out)
    call("show", name, "--health")
    call("verify", out)
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "small", 1, {"model.a": torch.ones(10, 10)})
    size_bytes = 256 << 20
    save(tmp_path / "large", 1, {"model.a": torch.ones(size_bytes // 4 // 512, 512)})
    arguments = [tmp_path / "small", tmp_path / "large", tmp_path / "target"]
    result = subprocess.run(
        [sys.executable, "-c", _PEAK, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    grown_bytes = int(result.stdout)
    assert grown_bytes > 0
    assert grown_bytes < size_bytes * 0.6, f"{grown_bytes >> 20} MiB"


_TORCH_FREE = """
import sys
from click.testing import CliRunner
from phalanx.cli.checkpoint_command import command
for arguments in (["ls", sys.argv[1]], ["show", sys.argv[1]], ["verify", sys.argv[1]], ["--help"], ["prune", "--help"]):
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
print("torch" in sys.modules)
"""


def test_needs_no_torch(run: Path) -> None:
    result = subprocess.run([sys.executable, "-c", _TORCH_FREE, run], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "False", result.stderr
