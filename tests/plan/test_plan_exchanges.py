"""What ranks exchange, and what of it computing covers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.communication.context import context
from phalanx.plan.communication.data import exchange
from phalanx.plan.communication.sharded import sharded
from phalanx.plan.communication.tail import gather_lead_s, reduce_tail_s
from phalanx.plan.communication.tensor import tensor
from phalanx.plan.hardware.load import load_cluster
from phalanx.plan.software import MEGATRON_2022, MEGATRON_2023
from phalanx.plan.types import Job, Model, Overlap, Strategy
from phalanx.plan.work.local import local_of
from phalanx.plan.work.operations import Passes

CLUSTER = load_cluster("selene", 512)
JOB = Job(Model(layers=96, hidden=12288, heads=96, vocab_rows=51200, max_sequence=2048), 2048, 64)

seconds = st.floats(0.01, 10.0)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8), seconds, st.integers(1, 20))
def test_the_tail_is_between_one_bucket_and_all(
    chunks: list[tuple[float, float]], backward: float, buckets: int
) -> None:
    reduce = [each for each, _ in chunks]
    ready = [at + backward for _, at in chunks]
    tail = reduce_tail_s(reduce, ready, [backward] * len(chunks), buckets)
    last = max(zip(ready, reduce, strict=True))[1]
    assert last / buckets - 1e-9 <= tail <= sum(reduce) + 1e-9


def test_the_tail_of_one_chunk_in_one_bucket_is_all_of_it() -> None:
    assert reduce_tail_s([2.0], [5.0], [1.0], 1) == pytest.approx(2.0)
    assert reduce_tail_s([2.0, 1.0], [5.0, 9.0], [1.0, 1.0], 1) == pytest.approx(1.0)
    assert reduce_tail_s([6.0, 1.0], [5.0, 9.0], [1.0, 1.0], 1) == pytest.approx(3.0)


def test_gathering_holds_up_only_what_comes_too_early() -> None:
    assert gather_lead_s([1.0, 1.0], [0.0, 5.0]) == pytest.approx(1.0)
    assert gather_lead_s([1.0, 9.0], [0.0, 5.0]) == pytest.approx(5.0)


def test_split_state_scatters_and_gathers_what_an_all_reduce_sums() -> None:
    job = replace(JOB, software=replace(MEGATRON_2023, reduce_bytes=4, gather_bytes=4))
    whole = exchange(job, Strategy(replicate=16, tensor=8, zero=0), CLUSTER, 1e9)
    parts = exchange(job, Strategy(shard=16, tensor=8, zero=1), CLUSTER, 1e9)
    assert parts.reduce_s + parts.gather_s == pytest.approx(whole.reduce_s, rel=0.05)
    mixed = exchange(job, Strategy(replicate=4, shard=4, tensor=8, zero=1), CLUSTER, 1e9)
    assert mixed.gather_s < parts.gather_s
    assert exchange(job, Strategy(tensor=8), CLUSTER, 1e9).reduce_s == 0


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("overlap", ["none", "chunked", "fused"])
def test_exposed_and_hidden_are_all_of_it(block: str, overlap: Overlap) -> None:
    job = replace(JOB, model=replace(JOB.model, block=block))  # type: ignore[arg-type]
    strategy = Strategy(tensor=8, tensor_overlap=overlap, tensor_chunks=4)
    local = local_of(job, strategy)
    found = tensor(job, strategy, CLUSTER, local)
    num_bytes = 2048 * 12288 * 2
    pair = sum(CLUSTER.collective_s(kind, num_bytes, 8) for kind in ("all_gather", "reduce_scatter"))
    branches = 1 if block == "parallel" else 2
    assert found.exposed.forward + found.hidden.forward == pytest.approx(branches * pair)
    assert 0 < found.exposed.forward <= branches * pair * (1 + 1e-9)
    if overlap != "none":
        assert found.exposed.forward < 0.8 * branches * pair


def test_gradients_of_inputs_are_summed_beside_those_of_weights() -> None:
    strategy = Strategy(tensor=8, sequence_parallel=False)
    job = replace(JOB, software=MEGATRON_2022)
    local = local_of(job, strategy)
    beside = tensor(job, strategy, CLUSTER, local).exposed
    after = tensor(
        replace(job, software=replace(MEGATRON_2022, tensor_backward_overlap=False)), strategy, CLUSTER, local
    )
    assert beside.forward == after.exposed.forward == after.exposed.backward_input
    assert beside.backward_input < 0.3 * beside.forward


def test_weights_gathered_beside_computing_slow_it_down() -> None:
    strategy = Strategy(shard=64, zero=3)
    gather = CLUSTER.collective_s("all_gather", 1e9 * JOB.software.gather_bytes, 64, 1)
    scatter = CLUSTER.collective_s("reduce_scatter", 1e9 * JOB.software.reduce_bytes, 64, 1)
    long = sharded(JOB, strategy, CLUSTER, 1e9, Passes(forward=10 * gather, backward_input=10 * (gather + scatter)))
    assert long.exposed.forward == pytest.approx(0.1 * gather)
    assert long.exposed.backward_input == pytest.approx(0.1 * (gather + scatter))
    short = sharded(JOB, strategy, CLUSTER, 1e9, Passes(forward=gather / 10))
    assert short.exposed.forward == pytest.approx(0.9 * gather + 0.1 * gather / 10)
    assert short.exposed.forward + short.hidden.forward == pytest.approx(gather)
    assert sharded(JOB, Strategy(shard=64), CLUSTER, 1e9, Passes()).exposed.total == 0


def test_keys_that_travel_beside_attention_slow_it_down() -> None:
    strategy = Strategy(context=2, sequence_parallel=False)
    local = local_of(JOB, strategy)
    send = CLUSTER.send_s(local.tokens * 2 * 12288 * 2, 1)
    found = context(strategy, CLUSTER, local, Passes(forward=20 * send, backward_input=40 * send))
    assert found.exposed.forward == pytest.approx(0.1 * send)
    assert found.exposed.forward + found.hidden.forward == pytest.approx(send)
