"""Data parallelism beside pipeline stages and split matrices; what optimizers need of other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import ThreadGroups, run_ranks
from zero_runs import Job, assert_parity, make_chunk, optimizer_of, single, split

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.parallel.config import ParallelConfig

TIED = {"tie_embeddings": True, "position": "learned"}
BIASED = {"bias": "all", "norm": "layer", "activation": "gelu", "vocab_multiple": 64}


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("layout", [Layout(pipeline=2), Layout(pipeline=2, shard=2), Layout(pipeline=2, replicate=2)])
def test_tied_embeddings_of_the_first_and_the_last_stage(layout: Layout, zero: int) -> None:
    if zero > 1 and layout.shard == 1:
        pytest.skip("nothing is split")
    job = Job(model=TIED, sgd=True, optim={"clip_norm": 0.4}, micro_batches=2)
    assert_parity(split(job, layout, zero=zero), single(job))


@pytest.mark.parametrize("name", ["adamw", "lamb", "came"])
def test_tied_embeddings_with_every_optimizer(name: str) -> None:
    job = Job(model=TIED, optim={"name": name, "clip_norm": 0.4})
    assert_parity(split(job, Layout(pipeline=2, shard=2)), single(job))


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
