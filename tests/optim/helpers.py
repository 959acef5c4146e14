"""Small problems that several tests of this room share."""

from __future__ import annotations

import torch

from phalanx.optim.build import OptimizerSet

SHAPES = {
    "embedding": (11, 8),
    "layers.0.attention.q": (8, 8),
    "layers.0.attention.norm": (8,),
    "layers.0.mlp.up": (12, 8),
    "layers.0.mlp.down": (8, 12),
    "norm": (8,),
    "head": (11, 8),
}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    """The same small decoder-like parameters at every call."""
    generator = torch.Generator().manual_seed(1)
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for n, s in SHAPES.items()}


def give_gradients(named: dict[str, torch.nn.Parameter], step: int, scale: float = 1.0) -> None:
    """Fresh gradients, a function of the step alone."""
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * scale


def run(optimizer: OptimizerSet, named: dict[str, torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(named, step)
        optimizer.step()


def snapshot(optimizer: OptimizerSet, named: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copies of all parameters and all state."""
    state = {name: tensor.detach().clone() for name, tensor in named.items()}
    return state | {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    differing = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not differing, f"differ: {differing}"
