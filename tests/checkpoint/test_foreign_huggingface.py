"""`transformers.Trainer` killed and resumed with our callback trains on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign_forks import Forks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def trained(forks: Forks, folder: Path, kill_at: int = 0) -> Any:
    arguments = [str(folder), kill_at, "mode=blocking", "every_steps=4"]
    [(status, told)] = forks.run("foreign_trainer:train", arguments, [{}])
    assert status == (-9 if kill_at else 0), told
    return told


@pytest.fixture(scope="module")
def through(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What nobody disturbs."""
    return trained(forks, tmp_path_factory.mktemp("through"))


@pytest.mark.slow
@pytest.mark.parametrize(("kill_at", "start"), [(9, 8), (15, 12)], ids=["mid-epoch", "epoch border"])
def test_killed_and_resumed_losses_are_the_same(
    forks: Forks, tmp_path: Path, through: Any, kill_at: int, start: int
) -> None:
    # An epoch is 22 samples, which are 6 steps of 4: step 8 is in the middle of one, step 12 at an end.
    trained(forks, tmp_path, kill_at)
    resumed = trained(forks, tmp_path)
    assert (through["start"], resumed["start"]) == (0, start)
    assert len(through["history"]) == 16
    assert resumed["history"] == through["history"]
    assert resumed["weights"] == through["weights"]
