"""What data parallelism sends, when, and what it keeps in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import ThreadGroups, run_ranks
from support.chunk_memory import memory_bytes, stored_bytes, wait_for_weights
from torch import Tensor
from zero_runs import Job, backwards, batch, make_chunk, optimizer_of

from phalanx.core.layout import Layout
from phalanx.model.shapes import num_parameters
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.group import Group
from phalanx.parallel.zero.chunk import ShardedChunk

AXES = ("replicate", "shard", "context")


def one_step(chunk: ShardedChunk, groups: ThreadGroups, job: Job, last: Callable[[], None] | None = None) -> None:
    ranks, index = groups.layout.size(*AXES), groups.layout.index(groups.rank, AXES)
    rows = [x.chunk(ranks)[index] for x in batch(0)]
    backwards(chunk.part, rows, job, 50.0, last or chunk.last_backward)


def on_ranks(layout: Layout, job: Job, body: Callable[[ThreadGroups, ShardedChunk], Any], **settings: Any) -> list[Any]:
    config = ParallelConfig(
        replicate=layout.replicate, shard=layout.shard, context=layout.context, **{"bucket_bytes": 20_000} | settings
    )
    return run_ranks(layout, lambda groups: body(groups, make_chunk(groups, job.config, config, job)))


def padded_bytes(chunk: ShardedChunk, ranks: int) -> int:
    return sum(b.place.padded_rows(ranks) * b.place.width * 4 for b in chunk._buckets)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gathered_and_reduced_once_per_step_and_bucket(zero: int, micro_batches: int) -> None:
    job = Job(micro_batches=micro_batches)

    def body(groups: ThreadGroups, chunk: ShardedChunk) -> tuple[Any, ...]:
        chunk.gather()
        one_step(chunk, groups, job)
        chunk.finish()
        traffic = groups.group("shard").traffic
        return traffic.calls, traffic.sent_bytes, len(chunk._buckets), padded_bytes(chunk, 2)

    for calls, sent, buckets, whole_bytes in on_ranks(Layout(shard=2), job, body, zero=zero):
        assert buckets > 3
        assert calls == {"all_gather": buckets, "reduce_scatter": buckets}
        assert sent == {"all_gather": whole_bytes // 2, "reduce_scatter": whole_bytes // 2}
        assert whole_bytes < 1.05 * 4 * num_parameters(job.config)


def test_hybrid_sums_replicas_over_parts_only() -> None:
    def body(groups: ThreadGroups, chunk: ShardedChunk) -> tuple[Any, ...]:
        chunk.gather()
        one_step(chunk, groups, Job())
        chunk.finish()
        traffic = groups.group("replicate").traffic
        return traffic.calls, traffic.sent_bytes, len(chunk._buckets), padded_bytes(chunk, 2)

    for calls, sent, buckets, whole_bytes in on_ranks(Layout(replicate=2, shard=2), Job(), body):
        assert calls == {"all_reduce": buckets}
        assert sent["all_reduce"] == 2 * (whole_bytes // 2) // 2


def test_zero_3_gathers_for_every_pass_and_reduces_after_every_backward() -> None:
    job = Job(micro_batches=3)

    def body(groups: ThreadGroups, chunk: ShardedChunk) -> tuple[Any, ...]:
        chunk.gather()
        one_step(chunk, groups, job)
        chunk.finish()
        vectors = sum(b.place.kind.vectors for b in chunk._buckets)
        embedding = sum(b.place.first_use == 0 for b in chunk._buckets)
        return groups.group("shard").traffic.calls, vectors, embedding, len(chunk._buckets)

    for calls, vectors, embedding, buckets in on_ranks(Layout(shard=2), job, body, zero=3):
        matrices = buckets - vectors
        assert calls["all_gather"] == vectors + 3 * (2 * matrices - embedding)
        assert calls["reduce_scatter"] == vectors + 3 * matrices


@pytest.mark.parametrize("zero", [1, 2])
def test_buckets_are_reduced_while_the_backward_pass_goes_on(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reductions start in the order in which gradients are made, each before the gradients of layers below it."""
    events: dict[int, list[str]] = {0: [], 1: []}
    reduce_scatter = Group.reduce_scatter

    def noted(group: Group, out: Tensor, x: Tensor) -> Any:
        events[group.index].append("reduce")
        return reduce_scatter(group, out, x)

    monkeypatch.setattr(Group, "reduce_scatter", noted)

    def body(groups: ThreadGroups, chunk: ShardedChunk) -> None:
        own = events[groups.rank]
        first, last = chunk.part.layers[0].mlp_output.weight, chunk.part.layers[1].mlp_output.weight
        for name, parameter in (("layer 0", first), ("layer 1", last)):
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: own.append(name))
        chunk.gather()
        one_step(chunk, groups, Job(micro_batches=2))
        own.append("backward done")
        chunk.finish()

    on_ranks(Layout(shard=2), Job(), body, zero=zero)
    for own in events.values():
        second = own[own.index("layer 0") + 1 :]  # the first backward pass reduced nothing
        assert own[: own.index("layer 0") + 1] == ["layer 1", "layer 0"]
        assert second.index("reduce") < second.index("layer 0") < second.index("backward done")
        assert "reduce" not in second[second.index("backward done") :]


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(replicate=2)])
def test_a_module_waits_for_its_own_weights_only(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[list[int]] = []

    def body(groups: ThreadGroups, chunk: ShardedChunk) -> None:
        chunk.gather()
        if groups.rank == 0:
            pending = [b._gathering for b in chunk._buckets]
            context = chunk.part.context(batch(0)[0])
            x = chunk.part.embed(batch(0)[0], context)
            waited.append([i for i, b in enumerate(chunk._buckets) if b._gathering is not pending[i]])
            chunk.part.blocks(x, context)
            waited.append([i for i, b in enumerate(chunk._buckets) if b._gathering is not pending[i]])
            assert chunk._buckets[-1]._gathering is pending[-1] is not None  # that of the head
        wait_for_weights(chunk)

    on_ranks(layout, Job(), body)
    after_embedding, after_blocks = waited
    assert after_embedding == [0] and len(after_blocks) > 1


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("zero", "parts"), [(1, "state"), (2, "state gradients"), (3, "state gradients parameters")])
def test_memory_is_divided_by_the_ranks(ranks: int, zero: int, parts: str) -> None:
    """Measured sizes of storages after a step; ZeRO-3 keeps vectors whole, which are few."""
    job = Job(optim={"name": "adamw"}, model={"hidden": 64})

    def body(groups: ThreadGroups, chunk: ShardedChunk) -> dict[str, float]:
        optimizer = optimizer_of(job, groups, chunk)
        chunk.gather()
        one_step(chunk, groups, job)
        chunk.finish()
        optimizer.step()
        vectors = sum(b.place.padded_rows(1) * b.place.width * 4 for b in chunk._buckets if b.place.kind.vectors)
        memory = memory_bytes(chunk)
        state = stored_bytes(optimizer.state_tensors().values())
        whole = 4 * num_parameters(job.config)
        return {
            "state": state / (2 * whole),
            "gradients": memory.gradients / whole,
            "parameters": (memory.parameters - (vectors if zero == 3 else 0)) / whole,
        }

    for measured in on_ranks(Layout(shard=ranks), job, body, zero=zero):
        for name, share in measured.items():
            assert share == pytest.approx(1 / ranks if name in parts.split() else 1.0, rel=0.06), name


def test_replicas_and_a_single_rank_keep_one_copy() -> None:
    def body(_groups: ThreadGroups, chunk: ShardedChunk) -> tuple[int, int]:
        chunk.gather()
        return memory_bytes(chunk)

    for parameters, gradients in on_ranks(Layout(replicate=2), Job(), body, zero=3):
        assert parameters == pytest.approx(4 * num_parameters(Job().config), rel=0.05) and gradients == 0


@pytest.mark.parametrize("zero", [2, 3])
def test_a_few_blocks_of_weights_and_whole_gradients_live_at_once(zero: int) -> None:
    """With eight layers, the most that parameters and gradients ever take while a step goes on."""
    job = Job(model={"layers": 8}, recompute="full", micro_batches=2 if zero == 3 else 1)

    def body(groups: ThreadGroups, chunk: ShardedChunk) -> tuple[int, int]:
        seen: Counter[str] = Counter()

        def look(*_: Any) -> None:
            memory = memory_bytes(chunk)
            seen["parameters"] = max(seen["parameters"], memory.parameters)
            seen["gradients"] = max(seen["gradients"], memory.gradients)

        chunk.gather()
        for block in chunk.part.layers:
            block.register_forward_pre_hook(look)
            for parameter in block.parameters():
                parameter.register_post_accumulate_grad_hook(look)
        one_step(chunk, groups, job)
        chunk.finish()
        return seen["parameters"], seen["gradients"]

    whole = 4 * num_parameters(job.config)
    for parameters, gradients in on_ranks(
        Layout(shard=2), job, body, zero=zero, bucket_bytes=1_000_000 if zero == 3 else 20_000
    ):
        block = whole / 8
        # A sum, and the whole gradients of the present bucket and of those on their way; ZeRO-2 has buckets of half a
        # block here, and less than four of them at a time.
        assert gradients <= whole / 2 + 3.5 * block
        assert parameters <= (whole / 2 + 2.5 * block if zero == 3 else whole * 1.05)


def test_gradients_may_travel_in_bf16() -> None:
    def body(groups: ThreadGroups, chunk: ShardedChunk) -> tuple[dict[str, int], int, dict[str, Tensor]]:
        chunk.gather()
        one_step(chunk, groups, Job())
        chunk.finish()
        gradients = {n: p.grad.clone() for n, p in chunk.parameters.items() if p.grad is not None}
        return dict(groups.group("shard").traffic.sent_bytes), padded_bytes(chunk, 2), gradients

    narrow = on_ranks(Layout(shard=2), Job(), body, reduce_dtype="bf16")
    wide = on_ranks(Layout(shard=2), Job(), body)
    for (sent, whole_bytes, mine), (_, _, exact) in zip(narrow, wide, strict=True):
        assert sent["reduce_scatter"] == whole_bytes // 4 and sent["all_gather"] == whole_bytes // 2
        assert all(g.dtype == torch.float32 for g in mine.values())
        errors = [float((mine[n] - exact[n]).norm() / exact[n].norm()) for n in mine if exact[n].numel()]
        assert 1e-5 < max(errors) < 1e-2
