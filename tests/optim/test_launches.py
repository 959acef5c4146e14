"""What a device is asked to do in a step: as many kernels for many layers as for few, and nothing read back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.optim import skipping
from phalanx.optim.build import OptimizerSet, build_optimizer
from phalanx.optim.config import OptimConfig
from phalanx.optim.skipping import SkippingOptimizer

from .helpers import give_gradients, snapshot

VIEWS = {"detach", "unbind", "view", "unsqueeze", "select", "expand", "transpose", "alias", "slice", "split", "squeeze"}
MATRICES = {"attention.q": (8, 8), "attention.o": (8, 8), "mlp.up": (12, 8), "mlp.down": (8, 12), "norm": (8,)}


class Launches(TorchDispatchMode):
    """Counts kernels: one an operator, but one a tensor where an operator on lists falls back to them one by one.

    That it does on CUDA where tensors that belong together differ in shape, in strides or in dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("_foreach"):
            lists = [x for x in args if isinstance(x, list) and x and isinstance(x[0], Tensor)]
            together = all(_alike(tensors) for tensors in zip(*lists, strict=True)) or name == "_foreach_norm"
            self.names += [name] if together else [f"{name}, one by one"] * len(lists[0])
        elif name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _alike(tensors: tuple[Tensor, ...]) -> bool:
    return len({(t.shape, t.stride(), t.dtype) for t in tensors}) == 1


def layers(count: int) -> dict[str, torch.nn.Parameter]:
    shapes = {f"layers.{i}.{name}": shape for i in range(count) for name, shape in MATRICES.items()}
    generator = torch.Generator().manual_seed(0)
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator)) for n, s in (shapes | {"head": (16, 8)}).items()}


def built(kind: str, named: dict[str, torch.nn.Parameter]) -> OptimizerSet:
    optimizer = build_optimizer(OptimConfig(name=kind), named)  # type: ignore[arg-type]
    for each in optimizer._optimizers.values():
        if isinstance(each, SkippingOptimizer):
            each.as_on_device = True
    return optimizer


def launches(kind: str, count: int) -> list[str]:
    named = layers(count)
    optimizer = built(kind, named)
    give_gradients(named, 0)
    optimizer.step(torch.zeros(()), torch.ones(()))
    with Launches() as found:
        optimizer.step(torch.zeros(()), torch.ones(()))
    return found.names


class NoKernels:
    def lamb_moments(self, parameters: list[Tensor], states: list[Any], numbers: Tensor) -> Tensor:
        return numbers.new_ones(len(parameters), 2)

    def lamb_apply(self, numbers: Tensor, factors: Tensor) -> None:
        pass


@pytest.mark.parametrize("kind", ["adamw", "lamb", "came", "muon"])
def test_more_layers_of_the_same_shapes_need_no_more_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LAMB by its Triton kernels, which are three a group whatever is in it."""
    if kind == "lamb":
        monkeypatch.setattr(skipping, "twin", lambda parameters: SimpleNamespace(Launch=NoKernels))
    few, many = launches(kind, 2), launches(kind, 6)
    assert few == many
    assert not [name for name in many if "one by one" in name or name == "_local_scalar_dense"]


@pytest.mark.parametrize("kind", ["came", "muon"])
def test_stacks_are_bounded_and_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack of matrices is updated as each of them alone; three of 8 x 8 numbers fit into one here."""
    found = []
    for limit in (1, 3 * 8 * 8 * 4, 1 << 28):
        monkeypatch.setattr(skipping, "STACK_BYTES", limit)
        named = layers(4)
        optimizer = built(kind, named)
        for step in range(3):
            give_gradients(named, step)
            optimizer.step(torch.zeros(()), torch.full((), 2.0))
        found.append((snapshot(optimizer, named), len(launches(kind, 4))))
    assert found[0][1] > found[1][1] > found[2][1]
    # Muon's products are in bfloat16 where the CPU has it.
    tolerance = {"rtol": 0.0, "atol": 2e-4} if kind == "muon" else {"rtol": 1e-6, "atol": 1e-7}
    for values, _ in found[1:]:
        for name, value in values.items():
            torch.testing.assert_close(value, found[0][0][name], **tolerance)
