"""Predictions made up for tests of how they are shown."""

from __future__ import annotations

from phalanx.plan.report.report_model import PredictionReport
from phalanx.plan.types import Job, Model, Part, Prediction, RankMemory, StageTimes, Strategy

GIB = float(2**30)


def part(path: str, seconds: float, mark: str = "derived", source: str = "curves of a100_80g_sxm, 2024") -> Part:
    return Part(path, seconds, mark, source)  # type: ignore[arg-type]


PARTS = (
    part("compute/attention/core", 0.8123),
    part("compute/attention/projections", 1.1044),
    part("compute/mlp", 2.2087),
    part("compute/head", 0.0711),
    part("compute/elementwise", 0.3319, "assumed", "fused as in Megatron-LM: assumed"),
    part("tensor/gather", 0.2101, "measured", "all-gather of 8 GPUs, vTrain's profile of 2023-11"),
    part("tensor/scatter", 0.2222),
    part("pipeline/bubble", 0.3011),
    part("pipeline/sends", 0.0207),
    part("data/reduce", 0.1999),
    part("optimizer", 0.0404),
    part("optimizer/norm", 0.0013),
    part("stragglers", 0.0301, "assumed", "lognormal with 0.5 % spread, MegaScale section 5"),
)
HIDDEN = (part("data/reduce", 0.4, "derived"), part("data/gather", 0.3), part("loader", 0.05, "assumed", "guess"))
START_UP = (part("start_up/imports", 3.2, "measured"), part("start_up/groups", 1.4), part("start_up/text", 0.2))


def memory(ranks: int, fullest: float = 51.0) -> tuple[RankMemory, ...]:
    kept = (fullest - 25.3, 1.5, 0.5, 1.25, 0.75)
    return tuple(
        RankMemory(
            rank, 8.1 * GIB, 10.2 * GIB, 3.0 * GIB, (kept[0] - 2 * rank) * GIB, *(GIB * each for each in kept[1:])
        )
        for rank in range(ranks)
    )


def prediction(ranks: int = 8, fullest: float = 51.0) -> Prediction:
    model = Model(layers=96, hidden=12288, heads=128, vocab_rows=51200, max_sequence=2048)
    return Prediction(
        job=Job(model, sequence=2048, global_batch=768),
        strategy=Strategy(
            pipeline=ranks, shard=16, tensor=8, chunks=6, schedule="interleaved_1f1b", recompute="attention"
        ),
        cluster="megascale",
        devices=1024,
        step_s=sum(piece.seconds for piece in PARTS),
        parts=PARTS,
        hidden=HIDDEN,
        memory=memory(ranks, fullest),
        start_up=START_UP,
        model_flops=1.67e18,
        mfu=0.531,
        notes=("gradients travel as fp32",),
        stages=None if ranks == 1 else stage_times(6 * ranks),
    )


def stage_times(count: int) -> StageTimes:
    return StageTimes(*((seconds,) * count for seconds in (0.01, 0.02, 0.01, 0.01)), 0.001, False)


def report(ranks: int = 8, fullest: float = 51.0) -> PredictionReport:
    return PredictionReport(
        prediction(ranks, fullest), "gpt-175b", 175_206_838_272, "A100 80 GB SXM", 80e9, 300_000_000_000, 2.0
    )
