"""Small runs for the tests of `phalanx checkpoint`, and how it is called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from phalanx.checkpoint.format.manifest import Meta
from phalanx.checkpoint.session.blocking_session import save
from phalanx.cli.checkpoint_command import command

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))  # forged and plain checkpoints


def make_tensors() -> dict[str, Tensor]:
    return {"model.norm": torch.zeros(5, dtype=torch.bfloat16), "model.head": torch.ones(30, 40)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (100, 200):
        save(tmp_path / "checkpoints", step, make_tensors(), {"samples": step * 8}, Meta({"seed": 1}, attempt=2))
    return tmp_path


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def damage(run: Path, step: int) -> None:
    path = checkpoint(run, step) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[2000] ^= 4
    path.write_bytes(content)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments], env={"COLUMNS": "180"}, catch_exceptions=False)


def call_json(*arguments: object) -> Any:
    return json.loads(call(*arguments, "--json").output)
