from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_helpers import make_tensors
from foreign_forks import Forks
from torch import Tensor

from phalanx.checkpoint.keeper.keeper_start import end_keeper


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return make_tensors()


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of checkpoints, with a keeper of its own, which ends with the test."""
    monkeypatch.setenv("PHALANX_KEEPER", str(tmp_path / "keeper"))
    yield tmp_path / "checkpoints"
    end_keeper(tmp_path / "keeper")


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()
