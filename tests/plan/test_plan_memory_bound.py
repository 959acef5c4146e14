"""The memory of many strategies at once, beside that of each alone."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan.memory.bound import memory_bound
from phalanx.plan.memory.rank import rank_memory
from phalanx.plan.types import Job, Model, Software, Strategy

MEGATRON = Software(
    name="megatron", residual_bytes=2, weight_bytes=2, master_bytes=4, fused_elementwise=True, even_stages=True
)
SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")


@st.composite
def models(draw: st.DrawFn) -> Model:
    experts = draw(st.sampled_from((0, 0, 8)))
    return Model(
        layers=draw(st.sampled_from((12, 24))),
        hidden=512,
        heads=8,
        kv_heads=draw(st.sampled_from((8, 4))),
        vocab_rows=draw(st.sampled_from((1024, 65536))),
        max_sequence=1024,
        gated=draw(st.booleans()),
        block=draw(st.sampled_from(("serial", "parallel"))),
        windows=draw(st.sampled_from(((0,), (128, 0)))),
        position=draw(st.sampled_from(("rotary", "learned"))),
        norm=draw(st.sampled_from(("rms", "layer"))),
        bias=draw(st.sampled_from(("none", "all"))),
        dropout=draw(st.booleans()),
        attention_dropout=False,
        tie_embeddings=draw(st.booleans()),
        experts=experts,
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    software = draw(
        st.sampled_from(
            (MEGATRON, replace(MEGATRON, fused_attention=False), Software(), Software(on_cpu=True, document_masks=True))
        )
    )
    software = replace(software, even_stages=draw(st.booleans()), fused_loss=draw(st.booleans()))
    precision = draw(st.sampled_from(("bf16", "fp32")))
    optimizer = draw(st.sampled_from(("adamw", "lamb", "came", "muon")))
    return Job(draw(models()), 1024, 64, precision, optimizer, software)


@st.composite
def strategies(draw: st.DrawFn) -> list[Strategy]:
    """Some that differ in numbers alone."""
    schedule = draw(st.sampled_from(SCHEDULES))
    common = Strategy(
        schedule=schedule,
        zero=draw(st.sampled_from((0, 1, 2, 3))),
        recompute=draw(st.sampled_from(("none", "attention", "elementwise", "mlp", "full"))),
        sequence_parallel=draw(st.booleans()),
        context_method=draw(st.sampled_from(("ring", "all_to_all"))),
    )
    found = []
    for _ in range(draw(st.integers(1, 6))):
        chunks = {"1f1b": 1, "zbv": 2}.get(schedule) or draw(st.sampled_from((1, 2, 3)))
        pipeline = draw(st.sampled_from((1, 2, 3, 4)))
        ranks = {axis: draw(st.sampled_from((1, 2))) for axis in ("replicate", "shard", "context", "tensor")}
        chunks = chunks if pipeline > 1 else 1
        size = draw(st.sampled_from((1, 2)))
        found.append(replace(common, pipeline=pipeline, chunks=chunks, micro_batch=size, **ranks))
    return found


def together(several: list[Strategy]) -> Strategy:
    axes = ("pipeline", "replicate", "shard", "context", "tensor", "expert", "micro_batch", "chunks")
    return replace(several[0], **{axis: np.array([getattr(s, axis) for s in several]) for axis in axes})


def is_even(job: Job, strategy: Strategy) -> bool:
    """Every stage has as many layers of each kind."""
    return job.software.even_stages and job.model.layers % (2 * strategy.stages) == 0


@settings(max_examples=120, deadline=None)
@given(jobs(), strategies())
def test_the_bound_is_the_fullest_rank_where_stages_are_even_and_never_more(job: Job, several: list[Strategy]) -> None:
    found = memory_bound(job, together(several))
    for strategy, bound in zip(several, found, strict=True):
        fullest = max(rank.total for rank in rank_memory(job, strategy))
        assert bound <= fullest * (1 + 1e-12)
        if is_even(job, strategy):
            assert bound == pytest.approx(fullest, rel=1e-12)


def test_what_has_more_stages_than_layers_fits_nowhere() -> None:
    job = Job(Model(layers=4, hidden=64, heads=4, vocab_rows=256, max_sequence=128), 128, 64, software=MEGATRON)
    assert np.isinf(memory_bound(job, Strategy(pipeline=np.array([8, 2]))))[0]


def test_hundreds_of_thousands_take_a_few_seconds_at_most() -> None:
    """A loaded machine of two cores takes several times as long as a quiet one, on which it is under a second."""
    model = Model(layers=96, hidden=12288, heads=96, vocab_rows=51200, max_sequence=2048)
    draw = np.random.default_rng(0)
    some = Strategy(
        pipeline=draw.choice([1, 2, 4, 8, 16], 300_000),
        chunks=draw.choice([1, 2, 3, 6], 300_000),
        tensor=draw.choice([1, 2, 4, 8], 300_000),
        shard=draw.choice([1, 8, 64], 300_000),
        schedule="interleaved_1f1b",
    )
    begin_s = time.process_time()
    found = memory_bound(Job(model, 2048, 6144, software=MEGATRON), some)
    assert time.process_time() - begin_s < 15
    assert np.isfinite(found).all() and (found > 0).all()
