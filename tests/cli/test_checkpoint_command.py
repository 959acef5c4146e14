from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from phalanx.checkpoint.format.manifest import Meta
from phalanx.checkpoint.save import save
from phalanx.cli.checkpoint import command
from phalanx.core.errors import UserError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    tensors = {"model.norm": torch.zeros(5, dtype=torch.bfloat16), "model.head": torch.zeros(30, 40)}
    for step in (100, 200):
        save(tmp_path / "checkpoints", step, tensors, {"samples": step * 8}, Meta({"seed": 1}, attempt=2))
    return tmp_path


def damage(run: Path, step: int) -> None:
    path = run / "checkpoints" / f"step-{step:08d}" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[2000] ^= 4
    path.write_bytes(content)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments], env={"COLUMNS": "160"}, catch_exceptions=False)


def test_list(run: Path) -> None:
    (run / "checkpoints" / "step-00000100" / "manifest.json").unlink()
    lines = call("list", run).output.splitlines()
    assert lines[1].split()[:2] == ["step-00000200", "200"]
    assert "KiB" in lines[1]
    assert "damaged: manifest.json is missing" in lines[2]


def test_inspect_shows_the_newest_of_a_run(run: Path) -> None:
    output = call("inspect", run).output
    assert "model.head" in output
    assert "30 x 40" in output
    assert "bfloat16" in output
    assert "1,200" in output
    assert "step" in output
    assert "step-00000200" in output
    assert "by attempt 2" in output
    assert "samples" in output


def test_inspect_prints_config_and_state_as_json(run: Path) -> None:
    path = run / "checkpoints" / "step-00000100"
    assert json.loads(call("inspect", path, "--config").output) == {"seed": 1}
    assert json.loads(call("inspect", path, "--state").output) == {"samples": 800}


def test_verify(run: Path) -> None:
    result = call("verify", run)
    assert result.exit_code == 0
    assert result.output.count("whole (") == 2
    damage(run, 200)
    result = call("verify", run)
    assert result.exit_code == 1
    assert "step-00000200: damaged: __0_0.distcp does not match its checksum" in result.output
    assert "step-00000100: whole" in result.output
    assert call("verify", run / "checkpoints" / "step-00000100").exit_code == 0


@pytest.mark.parametrize("name", ["list", "inspect", "verify"])
def test_nothing_there_is_a_user_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="there is no checkpoint here; give a run folder"):
        call(name, tmp_path)
    with pytest.raises(UserError, match="there is no such folder"):
        call(name, tmp_path / "absent")


def test_needs_no_torch() -> None:
    code = "import sys, phalanx.cli.checkpoint, phalanx.checkpoint.storage.prune; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
