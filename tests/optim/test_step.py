"""Skipped steps change nothing, bit for bit; a scale is the same as scaled gradients; references elsewhere agree."""

from __future__ import annotations

import math
import traceback
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.optim import muon
from phalanx.optim.build import OptimizerSet, build_optimizer
from phalanx.optim.came import CAME
from phalanx.optim.config import OptimConfig
from phalanx.optim.lamb import LAMB
from phalanx.optim.muon import COEFFICIENTS, Muon, orthogonalise

from .helpers import assert_same, give_gradients, parameters, run, snapshot

KINDS = ("adamw", "lamb", "came", "muon")


def build(kind: str, named: dict[str, torch.nn.Parameter], *, masked: bool = False, **settings: Any) -> OptimizerSet:
    optimizer = build_optimizer(OptimConfig(name=kind, **settings), named)  # type: ignore[arg-type]
    for each in optimizer._optimizers.values():
        if masked and not isinstance(each, torch.optim.AdamW):
            each.as_on_device = True  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("warm", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_changes_no_bit(kind: str, warm: int, masked: bool) -> None:
    named = parameters()
    optimizer = build(kind, named, masked=masked)
    run(optimizer, named, range(warm))
    before = snapshot(optimizer, named)
    for bad in (math.nan, math.inf, 1e30):
        give_gradients(named, 7, scale=bad)
        optimizer.step(found_inf=torch.ones(()), grad_scale=torch.tensor(bad))
    assert_same(snapshot(optimizer, named), before)
    give_gradients(named, warm)
    optimizer.step(found_inf=torch.zeros(()))
    fresh = parameters()
    unbroken = build(kind, fresh, masked=masked)
    run(unbroken, fresh, range(warm))
    give_gradients(fresh, warm)
    unbroken.step(found_inf=torch.zeros(()))
    assert_same(snapshot(optimizer, named), snapshot(unbroken, fresh))


class _Read(TorchDispatchMode):
    """Notes every value of a tensor that becomes a number of Python's, for which the host would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found.append("".join(traceback.format_stack(limit=6)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["lamb", "came", "muon"])
def test_a_step_reads_no_value_back(kind: str) -> None:
    """AdamW is torch's own, fused on a GPU."""
    named = parameters()
    optimizer = build(kind, named, masked=True)
    for each in optimizer._optimizers.values():
        each.param_groups = [] if isinstance(each, torch.optim.AdamW) else each.param_groups
    found_inf, grad_scale = torch.zeros(()), torch.ones(())
    give_gradients(named, 0)
    with _Read() as read:
        optimizer.step(found_inf=found_inf, grad_scale=grad_scale)
        optimizer.step()
    assert not read.found, read.found[0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_scale_is_the_same_as_scaled_gradients(kind: str, masked: bool) -> None:
    mine, theirs = parameters(), parameters()
    scaled, plain = build(kind, mine, masked=masked), build(kind, theirs)
    for step in range(4):
        give_gradients(mine, step, scale=8.0)
        scaled.step(found_inf=torch.zeros(()), grad_scale=torch.tensor(8.0))
        give_gradients(theirs, step)
        plain.step()
    tolerance = {"rtol": 0.0, "atol": 2e-3} if kind == "muon" else {"rtol": 1e-5, "atol": 1e-6}
    for name in mine:  # Muon rounds to bfloat16 on the way
        torch.testing.assert_close(mine[name], theirs[name], **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_clip_is_torchs_clip(kind: str) -> None:
    mine, theirs = parameters(), parameters()
    ours, plain = build(kind, mine, clip_norm=0.5), build(kind, theirs)
    for step in range(3):
        give_gradients(mine, step)
        norm, scale = ours.clip()
        ours.step(grad_scale=scale)
        give_gradients(theirs, step)
        expected = torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.5)
        torch.testing.assert_close(norm, expected)
        plain.step()
    tolerance = {"rtol": 0.0, "atol": 2e-3} if kind == "muon" else {"rtol": 1e-5, "atol": 1e-6}
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], **tolerance)


def test_gradients_below_the_limit_are_not_touched() -> None:
    named = parameters()
    give_gradients(named, 0, scale=1e-3)
    optimizer = build("adamw", named, clip_norm=1.0)
    _, scale = optimizer.clip()
    assert scale is not None and scale.item() == 1.0
    assert build("adamw", named, clip_norm=0.0).clip()[1] is None


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(monkeypatch: pytest.MonkeyPatch, adjust: str, nesterov: bool) -> None:
    monkeypatch.setattr(muon, "cpu_has_fast_bf16", lambda: True)  # torch's takes bfloat16 whatever it costs
    shapes = [(16, 16), (16, 40), (40, 16)]
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(s, generator=generator) for s in shapes]
    mine, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust}
    ours, torchs = Muon(mine, **settings), torch.optim.Muon(theirs, **settings)
    for _ in range(5):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        ours.step()
        torchs.step()
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=1e-6)
            torch.testing.assert_close(ours.state[a]["momentum_buffer"], torchs.state[b]["momentum_buffer"])


@pytest.mark.parametrize("is_fast", [False, True])
def test_muon_takes_the_precision_that_the_cpu_is_fast_in(monkeypatch: pytest.MonkeyPatch, is_fast: bool) -> None:
    monkeypatch.setattr(muon, "cpu_has_fast_bf16", lambda: is_fast)
    weight = torch.nn.Parameter(torch.zeros(24, 64))
    weight.grad = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    values = -weight.detach()
    assert torch.equal(values, values.bfloat16().float()) == is_fast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_updates_are_nearly_orthogonal_also_in_batches(dtype: torch.dtype) -> None:
    stack = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(0))
    batched = orthogonalise(stack, COEFFICIENTS, 5, 1e-7, dtype)
    for one, of_batch in zip(stack, batched, strict=True):
        torch.testing.assert_close(orthogonalise(one, COEFFICIENTS, 5, 1e-7, dtype), of_batch, rtol=0.0, atol=2e-2)
        values = torch.linalg.svdvals(of_batch.float())
        assert values.min() > 0.5 and values.max() < 1.3


def test_adamw_through_the_set_is_torchs() -> None:
    mine, theirs = parameters(), parameters()
    ours = build("adamw", mine, lr=3e-3, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.2)
    decayed = [p for n, p in theirs.items() if p.dim() == 2 and n != "embedding"]
    rest = [p for n, p in theirs.items() if p.dim() == 1 or n == "embedding"]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.9), eps=1e-7, foreach=True)
    for step in range(5):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        ours.step()
        torchs.step()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name])


@pytest.mark.parametrize("kind", ["lamb", "came", "muon"])
def test_gradients_of_bfloat16_are_widened(kind: str) -> None:
    mine, theirs = parameters(), parameters()
    ours, wide = build(kind, mine), build(kind, theirs)
    give_gradients(mine, 0)
    for name, p in mine.items():
        assert p.grad is not None
        rounded = p.grad.bfloat16()
        theirs[name].grad = rounded.float()
        p.grad = None
        p.grad_dtype = torch.bfloat16  # type: ignore[attr-defined]
        p.grad = rounded
    narrow = {n: p for n, p in mine.items() if not isinstance(owner_of(ours, p), torch.optim.AdamW)}
    for n, p in mine.items():
        if n not in narrow:
            p.grad, p.grad_dtype = None, torch.float32  # type: ignore[attr-defined]
            p.grad = theirs[n].grad
    ours.step()
    wide.step()
    assert narrow
    for name in mine:
        assert torch.equal(mine[name], theirs[name])


def owner_of(optimizer: OptimizerSet, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    return next(
        o for o in optimizer._optimizers.values() for g in o.param_groups if any(parameter is p for p in g["params"])
    )


@pytest.mark.parametrize("make", [LAMB, CAME])
def test_low_precision_parameters_are_refused(make: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 3, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="master weights"):
        make([parameter]).step()


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (LAMB, {"lr": -1.0}, "lr = -1.0"),
        (LAMB, {"betas": (0.9, 1.0)}, "betas"),
        (CAME, {"betas": (0.9, 0.99)}, "three rates"),
        (CAME, {"eps": (1e-8,)}, "two numbers"),
        (CAME, {"clip_threshold": 0.0}, "clip_threshold"),
        (Muon, {"adjust_lr_fn": "none"}, "adjust_lr_fn"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([torch.nn.Parameter(torch.zeros(2, 2))], **settings)


def test_a_vector_is_no_matrix_for_muon() -> None:
    with pytest.raises(ValueError, match="use AdamW"):
        Muon([torch.nn.Parameter(torch.zeros(3))])


def test_state_of_came_is_at_most_0_55_of_adamw() -> None:
    shapes = {"layers.0.up": (512, 384), "layers.0.q": (384, 384), "norm": (384,), "embedding": (1024, 384)}
    named = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    sizes = {kind: state_bytes(build(kind, named)) for kind in ("adamw", "came")}
    assert sizes["came"] <= 0.55 * sizes["adamw"]


def state_bytes(optimizer: OptimizerSet) -> int:
    return sum(t.numel() * t.element_size() for t in optimizer.state_tensors().values())


@pytest.mark.parametrize("kind", ["lamb", "came"])
def test_aliases_of_one_storage_are_as_separate_tensors(kind: str) -> None:
    merged = torch.randn(24, 8, generator=torch.Generator().manual_seed(5))
    names = [f"layers.0.attention.{n}" for n in "qkv"]
    aliases = {n: torch.nn.Parameter(merged[8 * i : 8 * i + 8]) for i, n in enumerate(names)}
    apart = {n: torch.nn.Parameter(p.detach().clone()) for n, p in aliases.items()}
    ours, separate = build(kind, aliases), build(kind, apart)
    for step in range(3):
        whole = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
        for i, n in enumerate(names):
            aliases[n].grad, apart[n].grad = whole[8 * i : 8 * i + 8], whole[8 * i : 8 * i + 8].clone()
        ours.step()
        separate.step()
    assert torch.equal(merged, torch.cat([p.detach() for p in apart.values()]))
