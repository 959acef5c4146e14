"""AdamW with moments of 32 bits by the Triton kernel, as a GPU runs it, beside torch's, and checkpoints of either."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from phalanx.optim import skipping
from phalanx.optim.adamw import AdamW
from phalanx.optim.build import OptimizerSet, build_optimizer
from phalanx.optim.config import OptimConfig

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {"embedding": (70, 24), "layers.0.norm": (24,), "layers.0.mlp.up": (40, 24), "layers.0.mlp.down": (24, 3)}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton interprets the kernels where there is none."""
    monkeypatch.setattr(skipping, "on_gpu", lambda tensor: True)
    yield
    monkeypatch.undo()


def named() -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(1)
    return {name: torch.nn.Parameter(torch.randn(shape).to(DEVICE)) for name, shape in SHAPES.items()}


def steps(optimizer: OptimizerSet, parameters: dict[str, torch.nn.Parameter], which: range) -> None:
    for step in which:
        torch.manual_seed(step)
        for p in parameters.values():
            p.grad = torch.randn(p.shape).to(DEVICE) * (float("nan") if step == 3 else 1.0)
        bad = torch.full((), float(step == 3), device=DEVICE)
        optimizer.set_lr(1.0 - step / 20)
        optimizer.step(found_inf=bad, grad_scale=torch.full((), 1.0 + step, device=DEVICE))


def built(parameters: dict[str, torch.nn.Parameter]) -> OptimizerSet:
    return build_optimizer(OptimConfig(lr=0.01), parameters)


def test_a_gpu_takes_the_kernel_and_a_cpu_torchs(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (ours,) = built(named())._optimizers.values()
    assert isinstance(ours, AdamW)
    monkeypatch.setattr(skipping, "on_gpu", lambda tensor: False)
    (theirs,) = built(named())._optimizers.values()
    assert isinstance(theirs, torch.optim.AdamW)


def test_weights_and_state_are_torchs(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two roundings apart, a skipped step and scaled gradients among them; and the gradients stay as they were."""
    mine, theirs = named(), named()
    ours = built(mine)
    steps(ours, mine, range(7))
    monkeypatch.setattr(skipping, "on_gpu", lambda tensor: False)
    reference = built(theirs)
    steps(reference, theirs, range(7))
    for name, p in mine.items():
        torch.testing.assert_close(p.detach(), theirs[name].detach(), rtol=1e-5, atol=1e-6)
    expected = reference.state_tensors()
    found = ours.state_tensors()
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and value.shape == expected[name].shape, name
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)
    assert float(found["embedding.step"]) == 6


@pytest.mark.parametrize("first_on_gpu", [True, False])
def test_a_run_goes_on_from_the_checkpoint_of_the_other(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, first_on_gpu: bool
) -> None:
    whole = named()
    steps(built(whole), whole, range(6))
    begun = named()
    monkeypatch.setattr(skipping, "on_gpu", lambda tensor: first_on_gpu)
    first = built(begun)
    steps(first, begun, range(4))
    kept = {name: value.clone() for name, value in first.state_tensors().items()}
    monkeypatch.setattr(skipping, "on_gpu", lambda tensor: not first_on_gpu)
    second = built(begun)
    second.load_state_tensors(kept)
    steps(second, begun, range(4, 6))
    for name, p in begun.items():
        torch.testing.assert_close(p.detach(), whole[name].detach(), rtol=1e-5, atol=1e-6)
