"""Bounds of layouts whose stages have unequal numbers of layers: none lies above the prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.plan.hardware import load_cluster
from phalanx.plan.predict import predict
from phalanx.plan.score import score
from phalanx.plan.types import Job, Model, Strategy

GPT3 = Model(layers=96, hidden=12288, heads=128, vocab_rows=64000, max_sequence=2048)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("pipeline", [2, 4])
def test_no_bound_lies_above_its_prediction(pipeline: int, zero: int) -> None:
    cluster = load_cluster("h100_400g", 256)
    job = Job(GPT3, sequence=2048, global_batch=6144)
    strategy = Strategy(pipeline=pipeline, shard=32 // pipeline, tensor=8, zero=zero, tensor_overlap="fused")  # type: ignore[arg-type]
    for chunks in (1, 5, 7, 11):
        for micro_batch in (1, 12):
            schedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
            one = replace(strategy, chunks=chunks, micro_batch=micro_batch, schedule=schedule)
            assert float(score(job, one, cluster).step_s[0]) <= predict(job, one, cluster).step_s, one
