"""Optimizers whose state grows, and optimizers with state of their own: saved, resumed bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.open_checkpoint import newest
from thread_ranks import ThreadPeers, succeed
from torch import Tensor, nn

from phalanx.checkpoint.foreign import checkpointer
from phalanx.checkpoint.foreign.checkpointer import Checkpointer

Make = Callable[[nn.Module], torch.optim.Optimizer]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(folder: Path, make: Make, seed: int, last: int, **settings: Any) -> dict[int, list[float]]:
    """Losses by step, and the weights after the last; gradients of the last layer come in step 3."""
    model = net(seed)
    optimizer = make(model)
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "every_steps": 1, **settings}
    told: dict[int, list[float]] = {}
    with Checkpointer(folder, **given) as checkpoints:
        for step in range(checkpoints.restore() + 1, last + 1):
            data = torch.rand(5, 3, generator=torch.Generator().manual_seed(step))

            def closure(data: Tensor = data, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = (model(data) if step > 2 else model[0](data)).square().sum()
                loss.backward()
                return loss

            told[step] = [optimizer.step(closure).item()]
            checkpoints.step(step)
    return told | {0: [p.double().sum().item() for p in model.parameters()]}


GROWING: dict[str, Make] = {
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=4),
    "used late": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize(
    ("name", "settings"), [("lbfgs", {"wait": True}), *((name, {"mode": "blocking"}) for name in GROWING)]
)
def test_state_that_grows_is_saved_and_resumed(folder: Path, name: str, settings: dict[str, Any]) -> None:
    expected = train(folder / "whole", GROWING[name], 0, 5, mode="blocking")
    for last in (3, 5):
        told = train(folder / "parts", GROWING[name], last - 3, last, **settings)
    assert told == {step: losses for step, losses in expected.items() if step in (0, 4, 5)}


def test_ranks_agree_on_what_has_come_or_grown_on_some_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 1 alone an expert is used for the first time in step 3, and a list of its own grows out of its room."""
    mine = threading.local()
    monkeypatch.setattr(checkpointer, "find_peers", lambda: mine.peers)

    def rank(peers: ThreadPeers, first: int, last: int) -> Any:
        mine.peers = peers
        experts = nn.ModuleDict({f"expert{peers.rank}": nn.Linear(2, 2), "all": nn.Linear(2, 2)})
        optimizer = torch.optim.AdamW(experts.parameters())
        seen: dict[str, Any] = {"seen": [] if first == 1 else None}
        given: dict[str, Any] = {"model": experts, "optimizer": optimizer, "extra": seen}
        with Checkpointer(tmp_path, **given, mode="blocking", every_steps=1) as checkpoints:
            assert checkpoints.restore() == first - 1
            for step in range(first, last + 1):
                for name, parameter in experts.named_parameters():
                    if "all" in name or (peers.rank == 1 and step > 2):
                        parameter.grad = torch.full_like(parameter, step)
                optimizer.step()
                if peers.rank == 1:
                    seen["seen"] += range(step * 2000)
                checkpoints.step(step)
                assert newest(tmp_path, pytest.fail).step == step
        steps = [int(optimizer.state[p]["step"]) for p in experts.parameters() if p in optimizer.state]
        return [steps, len(seen["seen"])]

    assert succeed(2, lambda peers: rank(peers, 1, 4)) == [[[4, 4], 0], [[2, 2, 4, 4], 20_000]]
    assert succeed(2, lambda peers: rank(peers, 5, 5)) == [[[5, 5], 0], [[3, 3, 5, 5], 30_000]]
