from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_helpers import make_tensors
from foreign_forks import Forks
from keeper_forks import fork_keeper
from keeper_processes import GUARD_S
from torch import Tensor

from phalanx.checkpoint.keeper.keeper_start import end_keeper


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return make_tensors()


@pytest.fixture(name="folder_without_keeper")
def folder_without_keeper_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of checkpoints; whoever needs a keeper starts one, which ends with the test."""
    monkeypatch.setenv("PHALANX_KEEPER", str(tmp_path / "keeper"))
    yield tmp_path / "checkpoints"
    end_keeper(tmp_path / "keeper")


@pytest.fixture(name="folder")
def folder_fixture(folder_without_keeper: Path, tmp_path: Path) -> Path:
    """Of checkpoints, with a keeper of its own that is there already."""
    fork_keeper(tmp_path / "keeper", ttl_s=GUARD_S, environ=os.environ)
    return folder_without_keeper


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()
