"""Whether a save is stale or sick, judged by a real keeper and persister: no false verdict, and no false silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from keeper_processes import until
from torch import Tensor, nn

from phalanx.checkpoint import Checkpointer
from phalanx.checkpoint.session.background_session import Session
from phalanx.checkpoint.storage.latest import read_latest
from phalanx.checkpoint.storage.location import open_store
from phalanx.core.errors import UserError

STEPS = 6


class Masked(nn.Module):
    """With a buffer that is half -inf, and one that is all NaN, as caches that were never used are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))
        self.register_buffer("never_used", torch.full((5,), torch.nan))

    def forward(self, given: Tensor) -> Tensor:
        scores: Tensor = self.mask[:1] + self.first(given)
        return self.second(scores.softmax(-1))


class Loop:
    """A training loop with a checkpoint, durable and waited for, at every step."""

    def __init__(self, folder: Path, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.lines: list[str] = []
        self.folder, self.model = folder, Masked()
        self.optimizer = optimizer(self.model.parameters())

    def run(self, update: Callable[[int], None], ending: bool = True) -> None:
        settings = {"every_steps": 1, "keep_last": 20, "wait": True}
        given = {"model": self.model, "optimizer": self.optimizer, "report": self.lines.append}
        checkpoints = Checkpointer(self.folder, **given, **settings)
        try:
            for step in range(1, STEPS + 1):
                self.optimizer.zero_grad()
                self.model(torch.rand(16, 4)).square().mean().backward()
                checkpoints.before_update()
                update(step)
                checkpoints.step(step, ending=ending and step == STEPS)
                if step == 1:
                    self._until_there_is_memory(checkpoints)
        finally:
            checkpoints.close(failed=True)

    def _until_there_is_memory(self, checkpoints: Checkpointer) -> None:
        session = checkpoints._session
        assert isinstance(session, Session)
        until(lambda: not session.link.ask(lambda keeper: keeper.busy, True))

    @property
    def kept_aside(self) -> list[str]:
        return [name[: name.index(".")] for name in open_store(str(self.folder)).quarantined()]

    @property
    def latest(self) -> int:
        found = read_latest(open_store(str(self.folder)))
        return found.step if found is not None and found.name else 0


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def require_no_verdict(loop: Loop) -> None:
    assert loop.kept_aside == []
    assert loop.lines == []
    assert loop.latest == STEPS


@pytest.mark.campaign(but=("second",))
@pytest.mark.parametrize("frozen", ["first", "second"])
def test_frozen_layers(folder: Path, frozen: str) -> None:
    loop = Loop(folder, adamw)
    getattr(loop.model, frozen).requires_grad_(False)
    loop.run(lambda _: loop.optimizer.step() and None)
    require_no_verdict(loop)


def test_groups_without_a_learning_rate(folder: Path) -> None:
    loop = Loop(folder, adamw)
    loop.optimizer = torch.optim.AdamW(
        [{"params": loop.model.first.parameters(), "lr": 0.0}, {"params": loop.model.second.parameters(), "lr": 0.01}]
    )
    loop.run(lambda _: loop.optimizer.step() and None)
    require_no_verdict(loop)


def test_skipped_steps(folder: Path) -> None:
    loop = Loop(folder, adamw)
    loop.run(lambda step: loop.optimizer.step() and None if step % 3 == 0 else None)
    require_no_verdict(loop)


def test_a_warm_up_from_zero_and_a_decay_to_it(folder: Path) -> None:
    loop = Loop(folder, adamw)

    def update(step: int) -> None:
        for group in loop.optimizer.param_groups:
            group["lr"] = 0.01 if step in (3, 4) else 0.0
        loop.optimizer.step()

    loop.run(update)
    require_no_verdict(loop)


@pytest.mark.campaign(but=("AdamW",))
@pytest.mark.parametrize("how", ["LBFGS", "AdamW"])
def test_steps_that_move_nothing(folder: Path, how: str) -> None:
    """A loop that has converged is healthy: its steps change nothing, and its end is as durable as any."""
    loop = Loop(folder, adamw)
    parameters = list(loop.model.parameters())
    if how == "LBFGS":
        loop.optimizer = torch.optim.LBFGS(parameters)
    else:
        loop.optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)  # its counters go on

    def loss() -> Tensor:
        total = torch.stack([parameter.square().sum() for parameter in parameters]).sum()
        total = total * (how == "LBFGS")  # the optimum is found in the first steps; or all gradients are zero
        loop.optimizer.zero_grad()
        total.backward()
        return total

    loop.run(lambda _: loop.optimizer.step(loss) and None)
    require_no_verdict(loop)


def test_steps_that_never_reach_the_weights(folder: Path) -> None:
    """As where another copy of the model is trained than the one that is saved."""
    loop = Loop(folder, adamw)
    before = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}

    def update(_: int) -> None:
        loop.optimizer.step()
        loop.model.load_state_dict(before)

    with pytest.raises(UserError, match=r"the last checkpoint \(step 6\) is not durable.*is stale: steps were taken"):
        loop.run(update)
    assert loop.kept_aside[0] == "stale-step-00000006"
    assert all(name.startswith("stale-") for name in loop.kept_aside)
    first = int(loop.kept_aside[-1][-8:])
    assert loop.latest < first, "there is nothing to compare the first one with"


def test_weights_that_are_not_numbers_any_more(folder: Path) -> None:
    loop = Loop(folder, adamw)

    def update(step: int) -> None:
        loop.optimizer.step()
        if step == 4:
            with torch.no_grad():
                loop.model.second.weight[1, 2] = torch.nan

    loop.run(update, ending=False)
    assert loop.latest == 3
    assert loop.kept_aside[-1] == "sick-step-00000004"
    assert all(name.startswith("sick-") for name in loop.kept_aside)
    assert any("second.weight" in line and "not finite" in line for line in loop.lines)
