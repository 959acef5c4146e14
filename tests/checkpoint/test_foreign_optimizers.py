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
from phalanx.core.errors import UserError

Make = Callable[[nn.Module], torch.optim.Optimizer]


Ranks = Callable[[int, Callable[[ThreadPeers], Any]], list[Any]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Runs threads whose `Checkpointer` takes them for ranks."""
    mine = threading.local()
    monkeypatch.setattr(checkpointer, "find_peers", lambda: mine.peers)

    def run(size: int, body: Callable[[ThreadPeers], Any]) -> list[Any]:
        def of_rank(peers: ThreadPeers) -> Any:
            mine.peers = peers
            return body(peers)

        return succeed(size, of_rank)

    return run


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


class Sam(torch.optim.Optimizer):
    """As widely copied: what is inside shares the groups, and `state_dict` knows nothing of it."""

    def __init__(self, params: Any, base: Any, **settings: Any) -> None:
        super().__init__(params, {"rho": 0.05, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["old"] = parameter.detach().clone()
                parameter.data.add_(parameter.grad, alpha=self.param_groups[0]["rho"])
        with torch.enable_grad():
            closure()
        for parameter, state in self.state.items():
            parameter.data.copy_(state["old"])
        self.base_optimizer.step()
        return loss

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.base_optimizer.param_groups = self.param_groups


class Lookahead(torch.optim.Optimizer):
    """Made without `Optimizer.__init__`; slow weights and a count in attributes; passes `state_dict` on."""

    def __init__(self, base: torch.optim.Optimizer, every: int = 3) -> None:
        self.base, self.param_groups, self.state, self.every, self.count = base, base.param_groups, {}, every, 0
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}
        self.defaults: dict[str, Any] = {}

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for parameter, slow in self.slow.items():
                slow.lerp_(parameter.detach(), 0.5)
                parameter.data.copy_(slow)
        return loss


class KeyedLookahead(Lookahead):
    """Its own format has parameters as keys."""

    def state_dict(self) -> Any:
        return {"slow": self.slow, "base": self.base.state_dict()}


class Passing(torch.optim.Optimizer):
    """As accelerate's: passes all on, and has no hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class ScheduleFree(torch.optim.Optimizer):
    """Groups and state are those of what is inside; the average is in a list, the count in a format of its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.mean, self.count = base, [p.detach().clone() for p in base.param_groups[0]["params"]], 0

    param_groups = property(lambda self: self.base.param_groups)
    state = property(lambda self: self.base.state)

    def state_dict(self) -> Any:
        return {"base": self.base.state_dict(), "mean": self.mean, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state["base"])
        self.mean, self.count = state["mean"], state["count"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.count += 1
        for mean, parameter in zip(self.mean, self.param_groups[0]["params"], strict=True):
            mean.lerp_(parameter.detach(), 1 / self.count)
            parameter.data.lerp_(mean, 0.1)
        return loss


class Counting(torch.optim.Optimizer):
    """Counts in ``state`` under a name, and in a dict; its momentum is in an object that has a state, or has none."""

    def __init__(self, params: Any, momentum: Any) -> None:
        super().__init__(params, {})
        self.state["steps"], self.counts, self.momentum = 0, {"all": 0}, momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.counts["all"] += 1
        self.state["steps"] += 1
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if parameter.grad is not None:
                past = self.momentum.held.setdefault(str(number), torch.zeros_like(parameter))
                past.mul_(0.9).add_(parameter.grad)
                parameter.sub_(past, alpha=0.01 / (self.counts["all"] + self.state["steps"]))
        return loss


class Hidden:
    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}


class Told(Hidden):
    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held = dict(state)


class Stateless(torch.optim.Optimizer):
    """Has a constant, and no state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.constant, self.logger = torch.tensor([1.0, 2.0]), Hidden()

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad.sign(), alpha=0.01)
        return loss


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


WRAPPERS: dict[str, Make] = {
    "sam": lambda model: Sam(model.parameters(), torch.optim.Adam, lr=0.05),
    "lookahead": lambda model: Lookahead(adam(model)),
    "lookahead of sam": lambda model: Lookahead(Sam(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)),
    "keyed by parameters": lambda model: KeyedLookahead(adam(model)),
    "passed on": lambda model: Passing(Lookahead(Sam(model.parameters(), torch.optim.Adam, lr=0.05))),
    "schedule-free": lambda model: ScheduleFree(adam(model)),
    "counting": lambda model: Counting(model.parameters(), Told()),
    "stateless": lambda model: Stateless(model.parameters()),
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_optimizers_are_resumed(tmp_path: Path, name: str) -> None:
    expected = train(tmp_path / "whole", WRAPPERS[name], 0, 8, mode="blocking")
    for last in (4, 8):
        told = train(tmp_path / "parts", WRAPPERS[name], last - 4, last, mode="blocking")
    assert told == {step: losses for step, losses in expected.items() if step in (0, 5, 6, 7, 8)}


def test_groups_that_are_shared_stay_shared(tmp_path: Path) -> None:
    train(tmp_path, WRAPPERS["sam"], 0, 2, mode="blocking")
    model = net(1)
    optimizer = Sam(model.parameters(), torch.optim.Adam, lr=0.7)
    group, given = optimizer.param_groups[0], {"model": model, "optimizer": optimizer}
    assert checkpointer.restore_checkpoint(tmp_path, **given) == 2
    assert optimizer.base_optimizer.param_groups[0] is optimizer.param_groups[0] is group
    assert group["lr"] == 0.05


def test_state_that_nobody_can_see_is_refused_before_work_is_lost(tmp_path: Path) -> None:
    message = r"optimizer: parameters are trained, and no state was seen .* but in 'momentum'; give it"
    model = net(0)
    optimizer = Counting(model.parameters(), Hidden())
    del optimizer.state["steps"], optimizer.counts
    optimizer.momentum.held["0"] = torch.zeros_like(model[0].weight)
    with (
        pytest.raises(UserError, match=message),
        Checkpointer(tmp_path, model=model, optimizer=optimizer, mode="blocking") as checkpoints,
    ):
        checkpoints.step(1)


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """What torch's has to do with checkpoints, without a process group: each rank updates parameters of its own."""

    def __init__(self, params: Any, rank: int, ranks: int) -> None:
        super().__init__(params, {"lr": 0.05})
        self.optim = torch.optim.Adam(self.param_groups[0]["params"][rank::ranks], lr=0.05)

    def state_dict(self) -> Any:
        raise RuntimeError("not consolidated")

    def load_state_dict(self, state: Any) -> None:
        raise RuntimeError("not consolidated")


def test_state_that_is_spread_over_ranks_is_put_together_on_another_number(ranks: Ranks, tmp_path: Path) -> None:
    def rank(peers: ThreadPeers, step: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        zero = ZeroRedundancyOptimizer(model.parameters(), peers.rank, peers.size)
        with Checkpointer(tmp_path, model=model, optimizer=zero, mode="blocking") as checkpoints:
            assert checkpoints.restore() == step - 1
            for number, parameter in enumerate(model.parameters(), start=1):
                parameter.grad = torch.full_like(parameter, number * step)
            checkpoints.before_update()
            zero.optim.step()
            checkpoints.step(step)
        return [state["exp_avg"].sum().item() for state in zero.optim.state.values()]

    # Between 2, 2 and 3 ranks, and alone; Adam's average of gradients that are proportional to the step.
    for step, size in enumerate((2, 2, 3, 1), start=1):
        told = ranks(size, lambda peers, step=step: rank(peers, step))
    average = sum(step * 0.1 * 0.9 ** (4 - step) for step in range(1, 5))
    assert told == [pytest.approx([average * 12, average * 2 * 4, average * 3 * 8, average * 4 * 2])]


def test_ranks_agree_on_what_has_come_or_grown_on_some_of_them(ranks: Ranks, tmp_path: Path) -> None:
    """On rank 1 alone an expert is used for the first time in step 3, and a list of its own grows out of its room."""

    def rank(peers: ThreadPeers, first: int, last: int) -> Any:
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

    assert ranks(2, lambda peers: rank(peers, 1, 4)) == [[[4, 4], 0], [[2, 2, 4, 4], 20_000]]
    assert ranks(2, lambda peers: rank(peers, 5, 5)) == [[[5, 5], 0], [[3, 3, 5, 5], 30_000]]
