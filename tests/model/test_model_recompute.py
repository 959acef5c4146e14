from __future__ import annotations

import pytest
import torch
from model_builders import VARIANTS, build, tiny, tokens
from torch import Tensor

from phalanx.model.context import DropoutState
from phalanx.model.decoder import Decoder
from phalanx.model.part import Recompute

MODES: tuple[Recompute, ...] = ("none", "selective", "full")


def _gradients(model: Decoder, mode: Recompute, ids: Tensor, dropout: DropoutState | None = None) -> dict[str, Tensor]:
    model.set_recompute(mode)
    model.zero_grad()
    sum(model.loss(model(ids, dropout=dropout), ids)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recompute_gives_the_same_gradient_bits(variant: str, dtype: torch.dtype) -> None:
    config = tiny(variant, dropout=0.2)
    model, ids = build(config, compute_dtype=dtype), tokens(config)
    dropout = DropoutState(3, 4, torch.tensor([0, 1]))
    expected = _gradients(model, "none", ids, dropout)
    assert len(expected) == len(list(model.parameters()))
    for mode in ("selective", "full"):
        got = _gradients(model, mode, ids, dropout)
        assert all(torch.equal(got[name], expected[name]) for name in expected), mode


def test_attention_dropout_is_replayed() -> None:
    config = tiny("llama", attention_dropout=0.3, attention_backend="math")
    model, ids = build(config), tokens(config)
    dropout = DropoutState(3, 4, torch.tensor([0, 1]))
    expected = _gradients(model, "none", ids, dropout)
    for mode in ("selective", "full"):
        got = _gradients(model, mode, ids, dropout)
        assert all(torch.equal(got[name], expected[name]) for name in expected), mode


@pytest.mark.parametrize("variant", ["llama", "nanogpt", "merged"])
def test_recompute_keeps_fewer_bytes(variant: str) -> None:
    """Bytes of distinct storages alive between forward and backward, beyond weights: what autograd keeps."""
    config = tiny(variant, hidden=64, layers=6)
    model, ids = build(config), tokens(config)
    none, selective, full = (_kept_bytes(model, mode, ids) for mode in MODES)
    assert full < 0.35 * none
    assert full < selective < 0.9 * none


def _kept_bytes(model: Decoder, mode: Recompute, ids: Tensor) -> int:
    model.set_recompute(mode)
    with torch.profiler.profile(profile_memory=True) as profile:
        hidden = model(ids)
    assert hidden.requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.events() if event.name == "[memory]")
