"""Data parallelism in all its forms trains as a single process does."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import ThreadGroups, run_ranks
from support.chunk_memory import memory_bytes, wait_for_weights
from torch import Tensor
from zero_runs import SEED, Job, assert_parity, batch, make_chunk, single, split, split_backwards

from phalanx.core.layout import Layout
from phalanx.model.decoder import Decoder
from phalanx.model.layers import Part
from phalanx.model.logical_parameters import initialise
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.zero.bucket import BucketKind, BucketLayout, StoredParameter, runs

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


@pytest.mark.campaign(but=("adamw-0.3-2", "lamb-0.3-1", "lamb-0.3-3", "came-0.0-2", "came-0.3-1", "came-0.3-3"))
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


@pytest.mark.parametrize("recompute", ["selective", "mlp", "full"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_recompute(recompute: str, zero: int) -> None:
    job = Job(sgd=True, micro_batches=2, recompute=recompute, steps=2)
    assert_parity(split(job, Layout(shard=2), zero=zero), single(job))


@pytest.mark.parametrize(("layout", "zero"), [(Layout(replicate=2), 1), (Layout(shard=2), 1), (Layout(shard=2), 3)])
def test_weights_gathered_in_bf16_give_the_same_bits(layout: Layout, zero: int) -> None:
    job = Job(optim={"name": "adamw"}, micro_batches=1, compute_dtype=torch.bfloat16, steps=3)
    one = Job(optim={"name": "adamw"}, micro_batches=2, compute_dtype=torch.bfloat16, steps=3)
    mine, whole = split(job, layout, zero=zero), single(one)  # the same forward passes, one after the other
    assert_parity(mine, whole, tolerance=1e-6)


@pytest.mark.campaign(but=("layout0-1-serial", "layout2-2-parallel", "layout3-3-serial"))
@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize(
    ("layout", "zero"), [(Layout(replicate=2), 1), (Layout(shard=2), 1), (Layout(shard=2), 2), (Layout(shard=2), 3)]
)
def test_products_in_8_bits_of_gathered_weights_give_the_same_bits(layout: Layout, zero: int, block: str) -> None:
    """Quantised once per step where weights stay whole, at every use where they come and go."""
    model = {"layers": 3, "block": block}
    job = Job(model=model, compute_dtype=torch.bfloat16, fp8_layers=range(1, 3), steps=3)
    one = replace(job, micro_batches=2)
    bf16 = replace(one, fp8_layers=range(0))
    mine, whole = split(job, layout, zero=zero), single(one)
    assert_parity(mine, whole, tolerance=1e-6)
    assert whole.losses != single(bf16).losses
    torch.testing.assert_close(torch.tensor(whole.losses), torch.tensor(single(bf16).losses), rtol=2e-2, atol=0)


def test_a_group_of_one_and_evaluation_between_steps() -> None:
    """Without gradients weights are gathered and freed as in training, and nothing is left behind."""
    job = Job()
    whole = Decoder(job.config)
    initialise(whole, SEED)
    tokens, targets, weights = batch(0)
    with torch.no_grad():
        expected = whole.loss(whole(tokens), targets, weights)[0]

    def body(groups: ThreadGroups) -> tuple[Tensor, tuple[int, int], tuple[int, int]]:
        chunk = make_chunk(groups, job.config, ParallelConfig(shard=groups.layout.shard, zero=3), job)
        chunk.gather()
        wait_for_weights(chunk)
        before = memory_bytes(chunk)
        part = chunk.part
        with torch.no_grad():
            context = part.context(tokens)
            hidden = part.norm(part.blocks(part.embed(tokens, context), context))  # type: ignore[misc]
            loss = part.sums(hidden, targets.flatten(), weights.flatten())[0]
        return loss, before, memory_bytes(chunk)

    for layout in (Layout(), Layout(shard=2)):
        for loss, before, after in run_ranks(layout, body):
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
            assert after[0] <= before[0] and after[1] == 0


def test_a_step_without_a_gradient_for_a_parameter_sums_zeros() -> None:
    def body(groups: ThreadGroups) -> dict[str, Tensor]:
        chunk = make_chunk(groups, Job().config, ParallelConfig(shard=2), Job())
        chunk.gather()
        chunk.finish()
        return {n: p.grad for n, p in chunk.parameters.items() if p.grad is not None}

    for gradients in run_ranks(Layout(shard=2), body):
        assert gradients and not any(g.any() for g in gradients.values())


def test_a_gradient_that_comes_too_late_is_not_lost_in_silence() -> None:
    def body(groups: ThreadGroups) -> str:
        job = Job(queue=WeightQueue())
        assert job.queue is not None
        chunk = make_chunk(groups, job.config, ParallelConfig(shard=2), job)
        chunk.gather()
        job.queue.begin(0)
        split_backwards(groups, chunk, replace(job, queue=None), 0)  # says that it is the last
        job.queue.end()
        chunk.reduce()
        job.queue.run(0)
        with pytest.raises(AssertionError, match="after its bucket had been reduced") as error:
            chunk.finish()
        return str(error.value)

    assert all(run_ranks(Layout(shard=2), body))


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(1, 3)), min_size=1, max_size=6),
    ranks=st.integers(1, 7),
    width=st.integers(1, 5),
)
def test_parts_of_a_bucket_hold_every_row_once(sizes: list[tuple[int, bool, int]], ranks: int, width: int) -> None:
    """Whatever the sizes: what the ranks' runs say of a flat bucket puts every logical parameter together again."""
    place = BucketLayout(BucketKind(torch.float32, False, False, False, -1), width)
    flat, logical = [], {}
    for number, (rows, vector, parts) in enumerate(sizes):
        shape = (rows * parts,) if vector else (rows * parts, width)
        names = [Part(f"{number}.{i}", "weight", i * rows, rows) for i in range(parts)]
        values = torch.randn(shape)
        logical |= {p.name: values[p.start : p.start + rows] for p in names}
        place.add(StoredParameter(torch.nn.Parameter(torch.empty(shape, device="meta")), tuple(names), []), number)
        flat.append(torch.cat([values.flatten(), torch.zeros(place.rows * width)])[: place.slots[-1].rows * width])
    table = torch.zeros(place.padded_rows(ranks) * width)
    table[: place.rows * width] = torch.cat(flat)
    found: dict[str, list[Tensor]] = {name: [] for name in logical}
    per_rank = place.padded_rows(ranks) // ranks
    for rank in range(ranks):
        own = table[rank * per_rank * width :]
        for run in runs(place, rank * per_rank, per_rank):
            assert run.start == sum(len(piece) for piece in found[run.name]) or run.count == 0
            found[run.name].append(own[run.offset : run.offset + math.prod(run.shape)].view(run.shape))
    for name, value in logical.items():
        assert torch.equal(torch.cat(found[name]), value)
