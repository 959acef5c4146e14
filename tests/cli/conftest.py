"""The command line is tested with the tiny runs of the trainer's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from train_helpers import Commands, overrides


@pytest.fixture(scope="session")
def commands() -> Commands:
    return Commands()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> Path:
    """A folder with a finished tiny run called ``run``; not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.toml").write_text("")
    result = commands.run(folder, "train", "tiny.toml", *overrides(folder, {"checkpoint.keep_last": 1}))
    assert result.status == 0, result
    return folder
