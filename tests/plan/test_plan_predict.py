"""`predict`: parts that sum, what is refused, and what every choice does to the step."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.plan.hardware.cluster import load_cluster
from phalanx.plan.predict import predict
from phalanx.plan.score import score
from phalanx.plan.software import MEGASCALE, MEGATRON_2021, MEGATRON_2023, PHALANX
from phalanx.plan.types import Job, Model, Prediction, Strategy

CLUSTER = load_cluster("selene", 1024)
GPT = Model(layers=48, hidden=6144, heads=64, vocab_rows=51200, max_sequence=2048)
ALONE = Strategy()
PROGRAMS = (PHALANX, MEGATRON_2021, MEGATRON_2023, MEGASCALE)


def job(**changed: object) -> Job:
    return replace(Job(GPT, 2048, 256, software=MEGATRON_2023), **changed)  # type: ignore[arg-type]


@st.composite
def spreads(draw: st.DrawFn) -> Strategy:
    schedule = draw(st.sampled_from(("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")))
    pipeline = draw(st.sampled_from((1, 2, 4, 8)))
    chunks = {"1f1b": 1, "zbv": 2}.get(schedule, draw(st.sampled_from((2, 3))))
    return Strategy(
        pipeline=pipeline,
        replicate=draw(st.sampled_from((1, 2))),
        shard=draw(st.sampled_from((1, 2, 4))),
        context=draw(st.sampled_from((1, 2))),
        tensor=draw(st.sampled_from((1, 2, 8))),
        micro_batch=draw(st.sampled_from((1, 2))),
        chunks=chunks,
        schedule=schedule,  # type: ignore[arg-type]
        zero=draw(st.sampled_from((0, 1, 2, 3))),  # type: ignore[arg-type]
        recompute=draw(st.sampled_from(("none", "attention", "elementwise", "mlp", "full"))),  # type: ignore[arg-type]
        sequence_parallel=draw(st.booleans()),
        tensor_overlap=draw(st.sampled_from(("none", "chunked", "fused"))),  # type: ignore[arg-type]
        context_method=draw(st.sampled_from(("ring", "all_to_all"))),  # type: ignore[arg-type]
        bucket_bytes=draw(st.sampled_from((0, 25_000_000))),
    )


@given(spreads(), st.sampled_from(PROGRAMS), st.sampled_from(("adamw", "lamb", "came", "muon")))
@settings(max_examples=80, deadline=None)
def test_parts_sum_to_the_step(strategy: Strategy, software: object, optimizer: str) -> None:
    found = predict(job(software=software, optimizer=optimizer), strategy, CLUSTER)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.step_s, rel=1e-12)
    assert all(part.seconds > 0 for part in found.hidden + found.start_up)
    assert all(part.mark in ("derived", "assumed") and part.source for part in found.parts)
    assert 0 < found.mfu < 1
    assert len(found.memory) == strategy.pipeline
    assert found.tokens_per_s == pytest.approx(256 * 2048 / found.step_s)


@given(spreads(), st.sampled_from(PROGRAMS))
@settings(max_examples=80, deadline=None)
def test_scores_are_bounds(strategy: Strategy, software: object) -> None:
    arrays = {axis: np.array([getattr(strategy, axis)] * 2) for axis in ("pipeline", "tensor", "shard", "micro_batch")}
    found = score(job(software=software), replace(strategy, **arrays), CLUSTER)
    exact = predict(job(software=software), strategy, CLUSTER)
    assert np.all(found.step_s <= exact.step_s)
    assert np.all(found.step_s >= 0.5 * exact.step_s)
    assert np.all(found.memory_bytes <= max(rank.total for rank in exact.memory) * (1 + 1e-9))


def test_scores_of_many_are_those_of_each() -> None:
    axes = {"pipeline": [1, 2, 4, 8], "tensor": [1, 2, 4, 8], "shard": [4, 8, 2, 1], "micro_batch": [1, 2, 2, 1]}
    together = score(job(), Strategy(**{axis: np.array(values) for axis, values in axes.items()}), CLUSTER)
    for place in range(4):
        alone = score(job(), Strategy(**{axis: np.array([values[place]]) for axis, values in axes.items()}), CLUSTER)
        assert alone.step_s[0] == pytest.approx(together.step_s[place], rel=1e-12)


def test_what_is_hidden_leaves_the_sum() -> None:
    strategy = Strategy(pipeline=4, shard=4, tensor=8, chunks=3, schedule="interleaved_1f1b")
    plain = predict(job(), strategy, CLUSTER)
    overlapped = predict(job(software=replace(MEGATRON_2023, data_overlap=True)), strategy, CLUSTER)
    assert overlapped.seconds("data/reduce") < 0.3 * plain.seconds("data/reduce")
    assert sum(part.seconds for part in overlapped.hidden if part.path == "data") > 0
    pipelined = predict(job(software=replace(MEGATRON_2023, pipeline_overlap=True)), strategy, CLUSTER)
    assert pipelined.seconds("pipeline/sends") < 0.5 * plain.seconds("pipeline/sends")
    chunked = predict(job(), replace(strategy, tensor_overlap="chunked"), CLUSTER)
    assert chunked.seconds("tensor") < plain.seconds("tensor")


def test_recompute_costs_what_is_computed_again() -> None:
    times = {
        kind: predict(job(), Strategy(tensor=8, pipeline=4, recompute=kind), CLUSTER).seconds("compute")  # type: ignore[arg-type]
        for kind in ("none", "attention", "full")
    }
    assert times["none"] < times["attention"] < times["full"] < 1.4 * times["none"]


def test_experts_exchange_rows() -> None:
    mixture = replace(GPT, experts=8, experts_per_token=2, moe_every=2)
    alone = predict(job(model=mixture), Strategy(shard=8, tensor=8), CLUSTER)
    spread = predict(job(model=mixture), Strategy(shard=8, tensor=8, expert=8), CLUSTER)
    assert alone.seconds("expert") == 0
    assert spread.seconds("expert") > 0
    assert spread.memory[0].parameters < alone.memory[0].parameters
    assert "compute/experts" in {part.path for part in spread.parts}


def test_a_window_takes_less_attention() -> None:
    fused = replace(MEGATRON_2023, fused_attention=True)
    windowed = replace(GPT, windows=(256, 0))
    seconds = [
        predict(job(model=model, software=fused), Strategy(tensor=8), CLUSTER).seconds("compute/attention")
        for model in (GPT, windowed)
    ]
    assert 0.5 < seconds[1] / seconds[0] < 0.75


def test_zero_3_gathers_in_every_pass() -> None:
    slow = replace(CLUSTER, nics_per_host=1)
    seconds = [predict(job(), Strategy(shard=64, zero=zero), slow).seconds("data") for zero in (1, 3)]  # type: ignore[arg-type]
    assert seconds[1] > 2 * seconds[0]


@pytest.mark.parametrize(
    ("changed", "field", "says"),
    [
        ({"tensor": 3}, "parallel.tensor", "64 query heads do not divide by 3"),
        ({"tensor": 2048}, "--devices", "the layout has 2048 ranks"),
        ({"micro_batch": 3}, "train.micro_batch", "do not divide"),
        ({"context": 3}, "parallel.context", "do not divide"),
        ({"pipeline": 64}, "parallel.pipeline", "64 pipeline stages cannot share 48 layers"),
        ({"shard": 2, "expert": 4}, "expert ranks", "do not divide"),
    ],
)
def test_nonsense_is_refused_with_the_cure(changed: dict[str, int], field: str, says: str) -> None:
    with pytest.raises(UserError) as raised:
        predict(job(), Strategy(**changed), CLUSTER)  # type: ignore[arg-type]
    assert raised.value.field == field
    assert says in str(raised.value)
    assert raised.value.cure


def test_fewer_micro_batches_than_ranks_are_predicted_for_programs_that_run_them() -> None:
    found = predict(job(global_batch=2), Strategy(pipeline=8, tensor=8), CLUSTER)
    assert found.seconds("pipeline/bubble") > 0.6 * found.step_s


def test_predicting_needs_no_torch() -> None:
    rooms = "phalanx.plan.predict, phalanx.plan.score, phalanx.plan.validate.compare"
    code = f"import sys, {rooms}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_two_predictions_are_equal() -> None:
    found: list[Prediction] = [predict(job(), Strategy(pipeline=4, tensor=8), CLUSTER) for _ in range(2)]
    assert found[0] == found[1]


def test_a_process_alone_casts_its_weights_once_per_step() -> None:
    cluster = load_cluster("h100_400g", 1)
    small = replace(GPT, layers=2, hidden=1024, heads=16, kv_heads=16)

    def parts(sequences: int, strategy: Strategy = ALONE) -> dict[str, float]:
        found = predict(Job(small, 2048, sequences), strategy, cluster if strategy.shard == 1 else CLUSTER)
        return {part.path: float(part.seconds) for part in found.parts}

    once, eight_times = parts(1), parts(8)
    assert once["optimizer/casts"] == eight_times["optimizer/casts"] > 0
    assert "compute/casts" not in eight_times
    assert not parts(1024, Strategy(shard=1024)).get("optimizer/casts")  # what is gathered is cast already


def test_a_loader_beside_the_step_counts_only_as_far_as_it_takes_longer_than_all_else() -> None:
    tiny = job(
        model=Model(layers=1, hidden=64, heads=1, vocab_rows=512, max_sequence=2048), global_batch=8, software=PHALANX
    )
    quick = predict(tiny, ALONE, CLUSTER)
    assert quick.seconds("loader") == 0

    def with_loader(step_s: float) -> Prediction:
        numbers = {**CLUSTER.numbers, "loader.step_s": replace(CLUSTER.number("loader.step_s"), value=step_s)}
        return predict(tiny, ALONE, replace(CLUSTER, numbers=numbers))

    slow = with_loader(3.0)
    assert slow.step_s == pytest.approx(3.0, rel=1e-2) and slow.step_s >= 3.0
    assert slow.seconds("loader") == pytest.approx(slow.step_s - quick.step_s)
    assert with_loader(0.5 * quick.step_s).step_s == quick.step_s


def test_a_loader_within_the_step_takes_what_was_published_of_such() -> None:
    cluster = load_cluster("megascale", 1024)
    (part,) = (part for part in predict(job(), ALONE, cluster).parts if part.path == "loader")
    assert part.seconds == 0.2 and "MegaScale" in part.source
    assert predict(job(software=MEGASCALE), ALONE, cluster).seconds("loader") == 0
