"""State: there from the start, named, and enough to go on bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch

from phalanx.core.errors import UserError
from phalanx.optim.build import OptimizerSet, build_optimizer, create_state
from phalanx.optim.config import GroupConfig, OptimConfig

from .helpers import assert_same, parameters, run, snapshot

CONFIGS = {
    "adamw": OptimConfig(name="adamw"),
    "lamb": OptimConfig(name="lamb"),
    "came": OptimConfig(name="came"),
    "muon": OptimConfig(name="muon"),
    "mixed": OptimConfig(name="muon", groups=(GroupConfig(pattern="*.mlp.*", optimizer="came"),)),
}


def made(config: OptimConfig) -> tuple[OptimizerSet, dict[str, torch.nn.Parameter]]:
    named = parameters()
    return build_optimizer(config, named), named


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_resumed_run_goes_on_bit_for_bit(config: OptimConfig) -> None:
    unbroken, named = made(config)
    run(unbroken, named, range(3))
    saved = snapshot(unbroken, named)
    run(unbroken, named, range(3, 6))

    resumed, again = made(config)
    for name, parameter in again.items():
        parameter.data.copy_(saved[name])
    resumed.load_state_tensors({name: saved[name] for name in resumed.state_tensors()})
    run(resumed, again, range(3, 6))
    assert_same(snapshot(resumed, again), snapshot(unbroken, named))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_steps_change_the_state_in_place(config: OptimConfig) -> None:
    optimizer, named = made(config)
    before = optimizer.state_tensors()
    values = {name: tensor.clone() for name, tensor in before.items()}
    run(optimizer, named, range(2))
    after = optimizer.state_tensors()
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert all(not torch.equal(values[name], after[name]) for name in after)


def test_the_state_made_ahead_is_what_torch_makes() -> None:
    ours, torchs = ([torch.nn.Parameter(torch.ones(3, 2))] for _ in range(2))
    ahead, first = (torch.optim.AdamW(ps, fused=True) for ps in (ours, torchs))
    create_state(ahead)
    made_ahead = {key: (t.dtype, t.shape, t.device) for key, t in ahead.state[ours[0]].items()}
    torchs[0].grad = torch.ones(3, 2)
    first.step()
    assert made_ahead == {key: (t.dtype, t.shape, t.device) for key, t in first.state[torchs[0]].items()}


def test_names_are_those_of_the_parameters() -> None:
    names = set(made(CONFIGS["muon"])[0].state_tensors())
    assert {"layers.0.mlp.up.momentum_buffer", "norm.step", "norm.exp_avg", "norm.exp_avg_sq"} <= names


def test_what_does_not_fit_is_refused_and_nothing_is_changed() -> None:
    optimizer, named = made(CONFIGS["adamw"])
    run(optimizer, named, range(1))
    before = snapshot(optimizer, named)
    good = {name: torch.ones_like(tensor) for name, tensor in optimizer.state_tensors().items()}
    missing = {name: tensor for name, tensor in good.items() if name != "head.exp_avg"}
    with pytest.raises(UserError, match=r"lacks 1 \(first head.exp_avg\)"):
        optimizer.load_state_tensors(missing)
    with pytest.raises(UserError, match=r"holds 1 unknown to this run \(first tail\)"):
        optimizer.load_state_tensors(good | {"tail": torch.ones(())})
    with pytest.raises(UserError, match=r"head.exp_avg is float32\[3\].*float32\[11, 8\]"):
        optimizer.load_state_tensors(good | {"head.exp_avg": torch.ones(3)})
    with pytest.raises(UserError, match="float64"):
        optimizer.load_state_tensors(good | {"head.exp_avg": torch.ones(11, 8, dtype=torch.float64)})
    assert_same(snapshot(optimizer, named), before)


def test_zeroing_reaches_the_storage_that_gradients_are_views_of() -> None:
    optimizer, named = made(CONFIGS["lamb"])
    owner = torch.ones(16, 8)
    named["layers.0.attention.q"].grad = owner[8:]
    optimizer.zero_grad()
    assert owner[8:].count_nonzero() == 0 and owner[:8].all()


@pytest.mark.parametrize("kind", ["lamb", "came", "muon"])
def test_torchs_own_state_dict_goes_round(kind: str) -> None:
    config = OptimConfig(name=kind)  # type: ignore[arg-type]
    first, named = made(config)
    run(first, named, range(2))
    second, again = made(config)
    for name, parameter in again.items():
        parameter.data.copy_(named[name].data)
    for key, optimizer in second._optimizers.items():
        optimizer.load_state_dict(copy.deepcopy(first._optimizers[key].state_dict()))
    run(first, named, range(2, 4))
    run(second, again, range(2, 4))
    assert_same(snapshot(second, again), snapshot(first, named))
