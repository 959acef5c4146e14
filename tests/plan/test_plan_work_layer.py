"""The operations of a layer: their FLOPs are the model's, and arrays give what plain numbers give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.model.config import ModelConfig
from phalanx.model.shapes import flops_per_token
from phalanx.plan.jobs import model_of
from phalanx.plan.layer import head, layer
from phalanx.plan.operations import Attend, Product, local_of
from phalanx.plan.software import FSDP2, MEGATRON_2022, PHALANX
from phalanx.plan.stages import model_flops
from phalanx.plan.types import Job, Model, Recompute, Strategy


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    heads = draw(st.sampled_from((4, 8, 12)))
    window = draw(st.sampled_from((0, 17, 64)))
    block = draw(st.sampled_from(("serial", "parallel")))
    return ModelConfig(
        vocab_size=draw(st.integers(50, 1000)),
        max_sequence=256,
        layers=draw(st.integers(1, 6)),
        hidden=heads * 16,
        heads=heads,
        kv_heads=draw(st.sampled_from((0, heads // 4, heads))),
        mlp_hidden=draw(st.sampled_from((0, 192))),
        activation=draw(st.sampled_from(("gelu", "swiglu"))),
        block=block,
        merged_projections=block == "parallel" and draw(st.booleans()),
        attention=("window", "full") if window else ("full",),
        window=window,
    )


def operations(job: Job, strategy: Strategy) -> list:
    local = local_of(job, strategy)
    found = [
        op for n in range(job.model.layers) for op in layer(local, job.model.window_of(n), job.model.is_mixture(n))
    ]
    return found + head(local)


def forward_flops(job: Job, strategy: Strategy) -> float:
    found = operations(job, strategy)
    products = sum(2.0 * op.m * op.n * op.k * op.batch for op in found if isinstance(op, Product))
    return products + sum(op.flops for op in found if isinstance(op, Attend))


@given(configs(), st.sampled_from((1, 2, 4)))
@settings(max_examples=60, deadline=None)
def test_products_and_attention_of_all_ranks_are_the_flops_of_the_model(config: ModelConfig, micro_batch: int) -> None:
    job = Job(model_of(config), 256, micro_batch)
    expected = flops_per_token(config, 256).forward * micro_batch * 256
    assert forward_flops(job, Strategy(micro_batch=micro_batch)) == pytest.approx(expected, rel=1e-12)
    assert model_flops(job) == pytest.approx(3 * expected, rel=1e-12)


@given(configs(), st.sampled_from((2, 4)), st.sampled_from((1, 2)))
@settings(max_examples=40, deadline=None)
def test_split_over_ranks_each_has_its_share(config: ModelConfig, tensor: int, context: int) -> None:
    if config.num_kv_heads % tensor:
        return  # ranks hold copies of keys and values then
    job = Job(model_of(config), 256, 2)
    whole = forward_flops(job, Strategy(micro_batch=2))
    share = forward_flops(job, Strategy(tensor=tensor, context=context, micro_batch=2))
    assert share * tensor * context == pytest.approx(whole, rel=1e-12)


def test_written_scores_multiply_all_pairs() -> None:
    model = Model(layers=1, hidden=64, heads=4, vocab_rows=100, max_sequence=128)
    fused = Job(model, 128, 1, software=replace(MEGATRON_2022, fused_attention=True))
    written = replace(fused, software=MEGATRON_2022)
    keys = (128 + 1) / 2
    more = forward_flops(written, Strategy()) - forward_flops(fused, Strategy())
    assert more == pytest.approx(4 * 64 * 128 * (128 - keys))


def _again(software: object, recompute: Recompute) -> float:
    """Weights whose products are made again, over a layer's."""
    model = Model(1, 64, 4, 100, 128, kv_heads=2, mlp_width=96, gated=True)
    local = local_of(Job(model, 128, 1, software=software), Strategy())  # type: ignore[arg-type]
    products = [op for op in layer(local, 0, False) if isinstance(op, Product) and op.weight]
    assert sum(op.n * op.k for op in products) == 64 * (64 + 32 + 32 + 64 + 3 * 96)
    return sum(op.n * op.k for op in products if recompute in op.again) / 64


def test_a_checkpoint_that_stops_early_does_not_make_the_last_product_again() -> None:
    """torch stops once it has what the backward pass reads; what the last product gives is read by nobody within."""
    assert _again(MEGATRON_2022, "full") == 64 + 32 + 32 + 64 + 3 * 96
    for software in (PHALANX, FSDP2):
        assert _again(software, "full") == 64 + 32 + 32 + 64 + 2 * 96


def test_torchtitans_selective_op_makes_every_second_product_again() -> None:
    """Of q, k, v, out, gate, up, down: k, out, up."""
    assert _again(FSDP2, "alternate") == 32 + 64 + 96
    assert _again(FSDP2, "elementwise") == 0


def test_experts_multiply_what_is_routed_to_them() -> None:
    dense = Model(layers=2, hidden=64, heads=4, vocab_rows=100, max_sequence=128, mlp_width=96)
    mixture = replace(dense, experts=8, experts_per_token=2, shared_experts=1, moe_every=2)
    more = forward_flops(Job(mixture, 128, 1), Strategy()) - forward_flops(Job(dense, 128, 1), Strategy())
    router, two_more = 2 * 128 * 64 * 8, 2 * (2 * 128 * 64 * 96 * 2)
    assert more == pytest.approx(router + two_more)
    spread = [forward_flops(Job(mixture, 128, 4), Strategy(shard=4, expert=e)) for e in (1, 2, 4)]
    assert spread == pytest.approx([spread[0]] * 3)


@pytest.mark.parametrize("software", [PHALANX, MEGATRON_2022, FSDP2])
def test_arrays_give_what_numbers_give(software: object) -> None:
    model = Model(layers=1, hidden=128, heads=8, vocab_rows=512, max_sequence=64)
    job = Job(model, 64, 8, software=software)  # type: ignore[arg-type]
    tensor, batch = np.array([8, 2, 4, 8]), np.array([1, 2, 1, 4])
    together = operations(job, Strategy(tensor=tensor, micro_batch=batch))
    for place in range(4):
        alone = operations(job, Strategy(tensor=int(tensor[place]), micro_batch=int(batch[place])))
        for one, many in zip(alone, together, strict=True):
            for name, value in vars(one).items():
                other = getattr(many, name)
                assert np.all((other[place] if isinstance(other, np.ndarray) else other) == value), (one.path, name)
