"""Data parallelism in all its forms trains as a single process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zero_runs import Job, assert_parity, single, split

from phalanx.core.layout import Layout

LAYOUTS = {
    "replicate2": (Layout(replicate=2), {}),
    "shard2_zero1": (Layout(shard=2), {"zero": 1}),
    "shard2_zero2": (Layout(shard=2), {"zero": 2}),
    "shard2_zero3": (Layout(shard=2), {"zero": 3}),
    "hybrid_zero1": (Layout(replicate=2, shard=2), {"zero": 1}),
    "hybrid_zero3": (Layout(replicate=2, shard=2), {"zero": 3}),
    "shard3_uneven": (Layout(shard=3), {"zero": 2}),
    "shard_and_context": (Layout(shard=2, context=2), {"zero": 1}),
}


@pytest.mark.parametrize(("layout", "settings"), LAYOUTS.values(), ids=LAYOUTS)
def test_gradient_descent_is_that_of_one_process(layout: Layout, settings: dict[str, Any]) -> None:
    job = Job(sgd=True, optim={"clip_norm": 0.0})
    assert_parity(split(job, layout, **settings), single(job))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
@pytest.mark.parametrize("name", ["adamw", "lamb", "came"])
def test_optimizers_on_parts_of_matrices(name: str, clip_norm: float, zero: int) -> None:
    job = Job(optim={"name": name, "clip_norm": clip_norm}, micro_batches=2)
    assert_parity(split(job, Layout(shard=2), zero=zero), single(job))


VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_embeddings": True, "position": "learned"},
    "biased": {"bias": "all", "norm": "layer", "activation": "gelu"},
    "qwen": {"bias": "qkv", "kv_heads": 1, "qk_norm": True},
    "merged": {"block": "parallel", "merged_projections": True, "kv_heads": 2, "bias": "all", "norm": "layer"},
}


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_models_of_every_form(model: dict[str, Any], zero: int) -> None:
    job = Job(model=model, sgd=True, optim={"clip_norm": 0.5}, steps=3)
    assert_parity(split(job, Layout(shard=3), zero=zero), single(job))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("zero", [2, 3])
def test_recompute(recompute: str, zero: int) -> None:
    job = Job(sgd=True, micro_batches=2, recompute=recompute, steps=2)
    assert_parity(split(job, Layout(shard=2), zero=zero), single(job))


@pytest.mark.parametrize(("layout", "zero"), [(Layout(replicate=2), 1), (Layout(shard=2), 1), (Layout(shard=2), 3)])
def test_weights_gathered_in_bf16_give_the_same_bits(layout: Layout, zero: int) -> None:
    job = Job(optim={"name": "adamw"}, micro_batches=1, compute_dtype=torch.bfloat16, steps=3)
    one = Job(optim={"name": "adamw"}, micro_batches=2, compute_dtype=torch.bfloat16, steps=3)
    mine, whole = split(job, layout, zero=zero), single(one)  # the same forward passes, one after the other
    assert_parity(mine, whole, tolerance=1e-6)
