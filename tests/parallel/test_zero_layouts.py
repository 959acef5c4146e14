"""Data parallelism beside pipeline stages and split matrices; what optimizers need of other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import ThreadGroups, run_ranks
from torch import Tensor
from zero_runs import SEED, Job, assert_parity, batch, make_chunk, optimizer_of, single, split, together

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout, Shard
from phalanx.model.decoder import DecoderPart
from phalanx.model.logical_parameters import initial_values
from phalanx.model.shapes import parameter_table
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.zero.chunk import ShardedChunk
from phalanx.parallel.zero.reductions import GradientNorm

TIED = {"tie_embeddings": True, "position": "learned"}
BIASED = {"bias": "all", "norm": "layer", "activation": "gelu", "vocab_multiple": 64}


SPLIT = Layout(pipeline=2, shard=2)


@pytest.mark.parametrize(
    ("layout", "zero"),
    [(Layout(pipeline=2), 1), (Layout(pipeline=2, replicate=2), 1), (SPLIT, 1), (SPLIT, 2), (SPLIT, 3)],
)
def test_tied_embeddings_of_the_first_and_the_last_stage(layout: Layout, zero: int) -> None:
    job = Job(model=TIED, sgd=True, optim={"clip_norm": 0.4}, micro_batches=2)
    assert_parity(split(job, layout, zero=zero), single(job))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_tied_embeddings_of_two_chunks_of_one_rank(zero: int) -> None:
    """As with ZBV, whose first and last stage are on one rank; two chunks, one after the other."""
    job = Job(model=TIED, sgd=True, optim={"clip_norm": 0.0}, steps=3, micro_batches=2)
    alone = single(job)

    def body(groups: ThreadGroups) -> tuple[Any, ...]:
        config = ParallelConfig(pipeline=2, schedule="zbv", shard=2, zero=zero, bucket_bytes=20_000)  # type: ignore[arg-type]
        chunks = zbv_chunks(groups, job, config)
        parameters = {name: p for chunk in chunks for name, p in chunk.parameters.items()}
        shards = {name: s for chunk in chunks for name, s in chunk.shards.items()}
        norm = GradientNorm(groups, {p: shards[n] for n, p in parameters.items()})
        norms, gradients = [], {}
        for step in range(job.steps):
            for chunk in chunks:
                chunk.gather()
            zbv_backwards(groups, chunks, job, step)
            for chunk in chunks:
                chunk.finish()
            norms.append(float(norm(parameters.values())))
            gradients = gradients or {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
            job.optimizer(parameters, whole_shapes=shapes(job)).step()
            for chunk in chunks:
                chunk.zero_grad()
        return gradients, shards, norms

    results = run_ranks(Layout(shard=2), body)
    whole = together([(gradients, shards) for gradients, shards, _ in results])
    for name, value in alone.gradients.items():
        torch.testing.assert_close(whole[name], value, rtol=1e-4, atol=1e-7)
    for *_, norms in results:
        assert norms == pytest.approx(alone.norms, rel=1e-5)


def shapes(job: Job) -> dict[str, tuple[int, ...]]:
    return {name: parameter.shape for name, parameter in parameter_table(job.config).items()}


def zbv_chunks(groups: ThreadGroups, job: Job, config: ParallelConfig) -> list[ShardedChunk]:
    table = parameter_table(job.config)
    whole = {name: Shard.whole(parameter.shape) for name, parameter in table.items()}

    def initial(name: str, shard: Shard) -> Tensor:
        return initial_values(job.config, table[name], SEED, offsets=shard.offsets, shape=shard.sizes)

    parts = [
        DecoderPart(job.config, layers=range(1), last=False, device="meta"),
        DecoderPart(job.config, layers=range(1, 2), first=False, device="meta"),
    ]
    first = ShardedChunk(parts[0], whole, groups, config, initial=initial)
    first.share_embedding(parts[1])
    last = ShardedChunk(parts[1], whole, groups, config, initial=initial)
    assert "embedding" in first.parameters and "embedding" not in last.parameters
    return [first, last]


def zbv_backwards(groups: ThreadGroups, chunks: list[ShardedChunk], job: Job, step: int) -> None:
    rows = batch(step)
    total = float(rows[2].sum())
    mine = [x.chunk(2)[groups.rank].chunk(job.micro_batches) for x in rows]
    for index, (tokens, targets, weights) in enumerate(zip(*mine, strict=True)):
        ending = index == job.micro_batches - 1
        first, last = (chunk.part for chunk in chunks)
        context = first.context(tokens)
        out = first.blocks(first.embed(tokens, context), context)
        x = out.detach().requires_grad_()
        assert last.norm is not None
        sums = last.sums(last.norm(last.blocks(x, context)), targets.flatten(), weights.flatten())
        for chunk, edge, gradient in ((chunks[1], sums[0] / total, None), (chunks[0], out, x)):
            if ending:
                chunk.last_backward()
            edge.backward(None if gradient is None else gradient.grad)


@pytest.mark.parametrize("name", ["adamw", "lamb", "came"])
def test_tied_embeddings_with_every_optimizer(name: str) -> None:
    job = Job(model=TIED, optim={"name": name, "clip_norm": 0.4})
    assert_parity(split(job, Layout(pipeline=2, shard=2)), single(job))


@pytest.mark.campaign(but=("model0-3", "model1-1", "model2-3"))
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("model", [BIASED, {"qk_norm": True, "bias": "qkv", "block": "parallel"}, TIED])
def test_split_matrices_and_what_all_tensor_ranks_share(model: dict[str, Any], zero: int) -> None:
    job = Job(model=model, sgd=True, optim={"clip_norm": 0.4}, micro_batches=2)
    assert_parity(split(job, Layout(shard=2, tensor=2), zero=zero), single(job))


@pytest.mark.parametrize("layout", [Layout(shard=2, tensor=2), Layout(pipeline=2, tensor=2)])
@pytest.mark.parametrize("name", ["adamw", "lamb", "came"])
def test_optimizers_over_rows_that_several_axes_split(name: str, layout: Layout) -> None:
    job = Job(model=BIASED, optim={"name": name, "clip_norm": 0.4}, steps=3)
    assert_parity(split(job, layout), single(job))


def test_lambs_own_clipping_sees_all_stages() -> None:
    job = Job(optim={"name": "lamb", "clip_norm": 0.0, "lamb": {"max_grad_norm": 0.2}})
    assert_parity(split(job, Layout(pipeline=2, shard=2)), single(job))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_weight_gradients_made_late(zero: int) -> None:
    job = Job(sgd=True, micro_batches=2, defers=True, steps=3)
    assert_parity(split(job, Layout(shard=2), zero=zero), single(job))


def test_all_axes_at_once() -> None:
    job = Job(model=TIED | {"bias": "all", "norm": "layer"}, sgd=True, micro_batches=2, steps=3)
    assert_parity(split(job, Layout(pipeline=2, shard=2, tensor=2), zero=2), single(job))


def test_muon_works_on_whole_matrices_and_refuses_parts() -> None:
    job = Job(optim={"name": "muon", "clip_norm": 0.4}, steps=3)
    assert_parity(split(job, Layout(pipeline=2, replicate=2)), single(job))
    with pytest.raises(UserError, match=r"optim\.name = 'muon'.*parallel\.replicate"):
        split(job, Layout(shard=2))


def test_settings_of_parameters_in_other_stages_are_no_mistake() -> None:
    job = Job(sgd=False, optim={"groups": [{"pattern": "head", "lr_scale": 0.5}]}, steps=3)
    assert_parity(split(job, Layout(pipeline=2)), single(job))


def test_lambs_own_clipping_is_refused_where_no_stage_can_know_it() -> None:
    optim = {"lamb": {"max_grad_norm": 1.0}, "groups": [{"pattern": "head", "optimizer": "lamb"}]}

    def body(groups: ThreadGroups) -> None:
        job = Job(optim=optim)
        optimizer_of(job, groups, make_chunk(groups, job.config, ParallelConfig(pipeline=2), job))

    with pytest.raises(UserError, match=r"optim\.lamb\.max_grad_norm = 1\.0.*optim\.clip_norm"):
        run_ranks(Layout(pipeline=2), body)


@pytest.mark.parametrize("name", ["adamw", "lamb", "came"])
def test_ranks_without_any_rows_of_a_parameter(name: str) -> None:
    """Eight ranks, of which most hold no row of most parameters, in one bucket."""
    job = Job(optim={"name": name, "clip_norm": 0.4}, steps=2, model={"layers": 1})
    layout = Layout(shard=4)

    def empty(groups: ThreadGroups) -> int:
        chunk = make_chunk(groups, job.config, ParallelConfig(shard=4), job)
        return sum(p.numel() == 0 for p in chunk.parameters.values())

    assert min(run_ranks(layout, empty)) > 2
    assert_parity(split(job, layout, bucket_bytes=1_000_000), single(job))


def test_bf16_beside_split_matrices() -> None:
    whole = Job(compute_dtype=torch.bfloat16, steps=2, sgd=True)
    mine, alone = split(whole, Layout(shard=2, tensor=2), zero=3), split(whole, Layout(shard=2, tensor=2), zero=1)
    assert_parity(mine, alone, tolerance=0.0)
