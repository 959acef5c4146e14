"""A run that was ended after its last step and before that was durable, and is started again: it has no step to do, and
yet what lies in memory is made durable before the memory is given back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.checkpoint import Checkpointer
from phalanx.checkpoint.format.checkpoint_files import examine
from phalanx.checkpoint.keeper.keeper_start import end_keeper
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.checkpoint.storage.latest import Latest, read_latest

GUARD_S = 120.0
STEP_S = 0.003
"""A step leaves a core to the processes that are being started."""


class Training:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.lines: list[str] = []
        self.model = nn.Linear(5, 5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        given = {"model": self.model, "optimizer": self.optimizer, "report": self.lines.append, "every_steps": 10**6}
        self.checkpoints = Checkpointer(folder, **given, **settings)

    def go(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.rand(3, 5)).square().mean().backward()
        self.optimizer.step()
        time.sleep(STEP_S)
        self.checkpoints.step(step)

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def committed_in_memory(folder: Path) -> dict[int, list[Tensor]]:
    """Train until some steps lie in memory and none is durable; the weights after each step."""
    training = Training(folder, memory_every_steps=1)
    weights: dict[int, list[Tensor]] = {}
    end_s = time.monotonic() + GUARD_S
    while not training.checkpoints._session.events():
        assert time.monotonic() < end_s
        training.go(len(weights) + 1)
        weights[len(weights) + 1] = training.weights
    training.checkpoints.close(failed=True)
    return weights


def latest_of(folder: Path) -> Latest | None:
    found = read_latest(LocalStore(folder), pytest.fail)
    return found if found is not None and found.name else None


@pytest.mark.campaign(but=("1",))
@pytest.mark.parametrize("steps", [0, 1])
def test_what_was_taken_up_from_memory_is_durable_at_the_end(folder: Path, steps: int) -> None:
    weights = committed_in_memory(folder)
    assert latest_of(folder) is None
    again = Training(folder)
    step = again.checkpoints.restore()
    assert step > 0
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again.weights, weights[step], strict=True))
    for more in range(steps):
        again.go(step + more + 1)
    again.checkpoints.close()
    latest = latest_of(folder)
    assert latest is not None
    assert latest.step == step + steps
    examine(folder / latest.name, manifest_sha256=latest.manifest_sha256)
    assert again.lines == []


def test_what_was_taken_up_from_storage_is_not_written_again(folder: Path) -> None:
    committed_in_memory(folder)
    for _ in range(3):
        again = Training(folder)
        again.checkpoints.restore()
        again.checkpoints.close()
        end_keeper(folder.parent / "keeper")  # which ends by itself, but a fast start may still meet it
    latest = latest_of(folder)
    assert latest is not None
    assert examine(folder / latest.name).attempt == 2


def test_what_failed_again_stays_in_memory(folder: Path) -> None:
    committed_in_memory(folder)
    again = Training(folder)
    step = again.checkpoints.restore()
    again.checkpoints.close(failed=True)
    assert latest_of(folder) is None
    last = Training(folder)
    assert last.checkpoints.restore() == step
    last.checkpoints.close()
    assert latest_of(folder) is not None
