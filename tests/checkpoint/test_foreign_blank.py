"""Models whose weights are about to be restored are made without drawing them, and nobody trains with such weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from phalanx.checkpoint.foreign.checkpointer import Checkpointer, save_checkpoint
from phalanx.checkpoint.foreign.restore_objects import UndrawnParameters
from phalanx.core.errors import UserError


class Net(nn.Module):
    """Weights drawn in all the usual ways, constants, a buffer that is drawn, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(6, 6))
        nn.init.trunc_normal_(self.scale)
        nn.init.xavier_uniform_(self.body.weight)
        self.register_buffer("noise", torch.empty(500).normal_(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embed(tokens)) @ self.scale) + self.noise[:6])


def drawn_bytes(make: type[nn.Module]) -> Tensor:
    """How far the generator is after making it."""
    torch.manual_seed(3)
    make()
    return torch.get_rng_state()


@pytest.mark.parametrize("draw", ["normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "xavier_normal_"])
def test_nothing_is_drawn_for_parameters_only(draw: str) -> None:
    parameter, plain, ones = nn.Parameter(torch.full((3, 3), 7.0)), torch.full((3, 3), 7.0), nn.Parameter(torch.ones(3))
    before = torch.get_rng_state()
    with UndrawnParameters():
        assert getattr(nn.init, draw)(parameter) is parameter
        assert torch.equal(torch.get_rng_state(), before)
        getattr(nn.init, draw)(plain)
        nn.init.zeros_(ones)
    assert not bool((plain == 7.0).any())
    assert torch.equal(ones, torch.zeros(3))


def test_a_model_draws_its_buffers_only() -> None:
    class Buffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", torch.empty(500).normal_(), persistent=False)

    with UndrawnParameters():
        blank = drawn_bytes(Net)
    assert torch.equal(blank, drawn_bytes(Buffer))
    with UndrawnParameters():
        net = Net()
    assert net.head.weight is net.embed.weight
    assert torch.equal(net.norm.weight, torch.ones(6))


def losses(folder: Path, steps: int, seed: int) -> list[float]:
    """Of a loop that makes its model as the documentation says, up to `steps`."""
    torch.manual_seed(seed)
    checkpoints = Checkpointer(folder, mode="blocking", every_steps=1)
    with checkpoints.blank_weights() as is_blank:
        net = Net()
    if is_blank:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(torch.nan)  # the worst that memory can hold
    net.noise.copy_(torch.arange(500) / 500)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    checkpoints.add(model=net, optimizer=optimizer)
    found = []
    with checkpoints:
        for step in range(checkpoints.restore() + 1, steps + 1):
            loss = nn.functional.cross_entropy(net(tokens := torch.randint(0, 11, (8,))), tokens.flip(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoints.step(step)
            found.append(loss.item())
    return found


def test_a_resumed_loop_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    straight = losses(tmp_path / "straight", 6, seed=1)
    assert losses(tmp_path / "cut", 3, seed=1) == straight[:3]
    assert losses(tmp_path / "cut", 6, seed=2) == straight[3:]


def test_blank_weights_are_never_trained(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, model=Net())
    checkpoints = Checkpointer(tmp_path, mode="blocking")
    with checkpoints.blank_weights() as is_blank:
        net = Net()
    assert is_blank
    checkpoints.add(model=net)
    with pytest.raises(UserError, match="the weights are blank"):
        checkpoints.step(2)
    for path in tmp_path.glob("step-*"):
        shutil.rmtree(path)
    with pytest.raises(UserError, match="no good state is left: checkpoint step-00000001, the latest, is gone"):
        checkpoints.restore()
    checkpoints.close(failed=True)


def test_what_the_checkpoint_lacks_is_refused_even_where_that_was_allowed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, model=nn.Linear(2, 2, bias=False))
    checkpoints = Checkpointer(tmp_path, mode="blocking")
    with checkpoints.blank_weights():
        net = nn.Linear(2, 2)
    checkpoints.add(model=net)
    with pytest.raises(UserError, match="1 missing in the checkpoint"):
        checkpoints.restore(strict=False)
    checkpoints.close(failed=True)


def test_where_there_is_nothing_the_model_is_made_as_ever(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path, mode="blocking")
    torch.manual_seed(5)
    with checkpoints.blank_weights() as is_blank:
        net = Net()
    assert not is_blank
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), Net().parameters(), strict=True))
    checkpoints.add(model=net)
    assert checkpoints.restore() == 0
    checkpoints.close()
