"""What ranks exchange, and what of it computing covers."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.hardware.cluster import load_cluster
from phalanx.plan.layer import context_exchange, row_exchange, tensor_exchange, zero3_exchange
from phalanx.plan.operations import Passes, local_of
from phalanx.plan.software import MEGATRON_2022, MEGATRON_2023
from phalanx.plan.stages import data_exchange, gather_lead_s, reduce_tail_s
from phalanx.plan.types import Job, Model, Overlap, Strategy

CLUSTER = load_cluster("selene", 512)
JOB = Job(Model(layers=96, hidden=12288, heads=96, vocab_rows=51200, max_sequence=2048), 2048, 64)

seconds = st.floats(0.01, 10.0)


def tail_of(reduce: list[float], ready: list[float], backward: float = 1.0, buckets: int = 1) -> float:
    """Of one rank with these chunks."""
    columns = (np.array(values)[:, None] for values in (reduce, ready, [backward] * len(ready)))
    return float(reduce_tail_s(*columns, np.array([float(buckets)]))[0])


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8), seconds, st.integers(1, 20))
def test_the_tail_is_between_one_bucket_and_all(
    chunks: list[tuple[float, float]], backward: float, buckets: int
) -> None:
    reduce = [each for each, _ in chunks]
    ready = [at + backward for _, at in chunks]
    tail = tail_of(reduce, ready, backward, buckets)
    last = max(zip(ready, reduce, strict=True))[1]
    assert last / buckets - 1e-9 <= tail <= sum(reduce) + 1e-9


def test_the_tail_of_one_chunk_in_one_bucket_is_all_of_it() -> None:
    assert tail_of([2.0], [5.0]) == pytest.approx(2.0)
    assert tail_of([2.0, 1.0], [5.0, 9.0]) == pytest.approx(1.0)
    assert tail_of([6.0, 1.0], [5.0, 9.0]) == pytest.approx(3.0)


def test_gathering_holds_up_only_what_comes_too_early() -> None:
    needed = np.array([[0.0, 5.0], [5.0, 0.0]])
    assert gather_lead_s(np.array([[1.0, 9.0], [1.0, 1.0]]), needed) == pytest.approx([1.0, 5.0])


@given(st.integers(1, 6), st.integers(1, 4), st.randoms())
def test_ranks_are_worked_out_beside_each_other_as_alone(chunks: int, ranks: int, random: Random) -> None:
    reduce, ready, needed = (
        np.array([[random.uniform(0, 9) for _ in range(ranks)] for _ in range(chunks)]) for _ in range(3)
    )
    buckets = np.array([float(random.randint(1, 9)) for _ in range(ranks)])
    tails = reduce_tail_s(reduce, ready, ready / 2, buckets)
    leads = gather_lead_s(reduce, needed)
    for n in range(ranks):
        one = slice(n, n + 1)
        assert reduce_tail_s(reduce[:, one], ready[:, one], ready[:, one] / 2, buckets[one]) == tails[n]
        assert gather_lead_s(reduce[:, one], needed[:, one]) == leads[n]


def test_split_state_scatters_and_gathers_what_an_all_reduce_sums() -> None:
    job = replace(JOB, software=replace(MEGATRON_2023, reduce_bytes=4, gather_bytes=4))
    whole = data_exchange(job, Strategy(replicate=16, tensor=8, zero=0), CLUSTER, 1e9)
    parts = data_exchange(job, Strategy(shard=16, tensor=8, zero=1), CLUSTER, 1e9)
    assert parts.reduce_s + parts.gather_s == pytest.approx(whole.reduce_s, rel=0.05)
    mixed = data_exchange(job, Strategy(replicate=4, shard=4, tensor=8, zero=1), CLUSTER, 1e9)
    assert mixed.gather_s < parts.gather_s
    assert data_exchange(job, Strategy(tensor=8), CLUSTER, 1e9).reduce_s == 0


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("overlap", ["none", "chunked", "fused"])
def test_exposed_and_hidden_are_all_of_it(block: str, overlap: Overlap) -> None:
    job = replace(JOB, model=replace(JOB.model, block=block))  # type: ignore[arg-type]
    strategy = Strategy(tensor=8, tensor_overlap=overlap, tensor_chunks=4)
    local = local_of(job, strategy)
    found = tensor_exchange(job, strategy, CLUSTER, local, row_exchange(job, strategy, CLUSTER, local))
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
    rows = row_exchange(job, strategy, CLUSTER, local)
    beside = tensor_exchange(job, strategy, CLUSTER, local, rows).exposed
    later = replace(job, software=replace(MEGATRON_2022, tensor_backward_overlap=False))
    after = tensor_exchange(later, strategy, CLUSTER, local, rows)
    assert beside.forward == after.exposed.forward == after.exposed.backward_input
    assert beside.backward_input < 0.3 * beside.forward


def test_weights_gathered_beside_computing_slow_it_down() -> None:
    strategy = Strategy(shard=64, zero=3)
    gather = CLUSTER.collective_s("all_gather", 1e9 * JOB.software.gather_bytes, 64, 1)
    scatter = CLUSTER.collective_s("reduce_scatter", 1e9 * JOB.software.reduce_bytes, 64, 1)
    long = zero3_exchange(
        JOB, strategy, CLUSTER, 1e9, Passes(forward=10 * gather, backward_input=10 * (gather + scatter))
    )
    assert long.exposed.forward == pytest.approx(0.1 * gather)
    assert long.exposed.backward_input == pytest.approx(0.1 * (gather + scatter))
    short = zero3_exchange(JOB, strategy, CLUSTER, 1e9, Passes(forward=gather / 10))
    assert short.exposed.forward == pytest.approx(0.9 * gather + 0.1 * gather / 10)
    assert short.exposed.forward + short.hidden.forward == pytest.approx(gather)
    assert zero3_exchange(JOB, Strategy(shard=64), CLUSTER, 1e9, Passes()).exposed.total == 0


def test_keys_that_travel_beside_attention_slow_it_down() -> None:
    strategy = Strategy(context=2, sequence_parallel=False)
    local = local_of(JOB, strategy)
    send = CLUSTER.send_s(local.tokens * 2 * 12288 * 2, 1)
    found = context_exchange(strategy, CLUSTER, local, Passes(forward=20 * send, backward_input=40 * send))
    assert found.exposed.forward == pytest.approx(0.1 * send)
    assert found.exposed.forward + found.hidden.forward == pytest.approx(send)
