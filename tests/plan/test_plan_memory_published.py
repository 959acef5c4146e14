"""Memory beside what Korthikanti et al. published: arXiv 2205.05198, figures 1 and 7, as digitised in shared/tables.

Their figures count the layers of a stage alone: no embedding, and no loss head. So parameters and optimizer are taken
of a rank in the middle of the pipeline, and activations of the first one, which has most passes under way.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.plan.hardware.cluster import load_cluster
from phalanx.plan.memory.rank import PUBLISHED_PEAKS, rank_memory, reserved_share
from phalanx.plan.predict import predict
from phalanx.plan.software import SOFTWARE
from phalanx.plan.types import Job, Model, RankMemory, Recompute, Software, Strategy
from phalanx.plan.validate.assumptions import TITAN_H100
from phalanx.plan.validate.published import TABLES, job_of, read_table, strategy_of

GIB = 1 << 30
TABLE = Path(__file__).parents[2] / "../shared/tables/korthikanti_fig1_fig7_memory.csv"
# Layers, hidden, heads; pipeline, chunks, micro-batch, global batch: their table 3.
CONFIGS = {
    "22B": (48, 6144, 64, 1, 1, 4, 4),
    "175B": (96, 12288, 96, 8, 3, 1, 64),
    "530B": (105, 20480, 128, 35, 3, 1, 280),
    "1T": (128, 25600, 160, 64, 1, 1, 512),
}
# 16-bit weights, fp32 gradients, masters and moments; attention writes its scores.
MEGATRON = Software(
    name="megatron",
    fused_attention=False,
    fused_elementwise=True,
    fused_loss=False,
    residual_bytes=2,
    weight_bytes=2,
    master_bytes=4,
    even_stages=True,
)


def memory_of(name: str, recompute: Recompute, sequence_parallel: bool) -> tuple[RankMemory, ...]:
    layers, hidden, heads, pipeline, chunks, micro_batch, global_batch = CONFIGS[name]
    model = Model(layers=layers, hidden=hidden, heads=heads, vocab_rows=51200, max_sequence=2048)
    strategy = Strategy(
        pipeline=pipeline,
        tensor=8,
        chunks=chunks,
        micro_batch=micro_batch,
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        zero=0,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )
    return rank_memory(Job(model, 2048, global_batch, software=MEGATRON), strategy)


@pytest.fixture(scope="module")
def published() -> dict[str, dict[str, float]]:
    if not TABLE.exists():
        pytest.skip(f"{TABLE} is not here")
    rows = csv.DictReader(line for line in TABLE.read_text().splitlines() if not line.startswith("#"))
    return {row.pop("model"): {key: float(value) for key, value in row.items()} for row in rows}


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_are_those_of_figure_1(name: str, published: dict[str, dict[str, float]]) -> None:
    kept = memory_of(name, "none", False)
    middle = kept[len(kept) // 2]
    state = middle.parameters + middle.gradients + middle.optimizer
    assert state / GIB == pytest.approx(published[name]["param_opt_gib"], rel=0.06)
    assert kept[0].activations / GIB == pytest.approx(published[name]["act_gib_none"], rel=0.06)
    both = memory_of(name, "attention", True)
    assert both[0].activations / GIB == pytest.approx(published[name]["act_gib_seqsel"], rel=0.06)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("column", "recompute", "sequence_parallel"),
    [("seq", "none", True), ("sel", "attention", False), ("seqsel", "attention", True), ("full", "full", False)],
)
def test_shares_are_those_of_figure_7(
    name: str, column: str, recompute: Recompute, sequence_parallel: bool, published: dict[str, dict[str, float]]
) -> None:
    base = memory_of(name, "none", False)[0].activations
    less = memory_of(name, recompute, sequence_parallel)[0].activations
    assert 100 * less / base == pytest.approx(published[name][f"act_pct_{column}"], rel=0.06)


@pytest.mark.parametrize(("tensor", "sequence_parallel"), [(1, False), (8, False), (8, True)])
def test_a_layer_keeps_what_the_paper_says(tensor: int, sequence_parallel: bool) -> None:
    """s b h (10 + 24 / t + 5 a s / (h t)), and (34 / t + ...) with sequence parallelism (section 4, table 2)."""
    sequence, batch, hidden, heads = 2048, 4, 6144, 64

    def kept(layers: int) -> float:
        deeper = Model(layers=layers, hidden=hidden, heads=heads, vocab_rows=64, max_sequence=2048)
        strategy = Strategy(tensor=tensor, micro_batch=batch, sequence_parallel=sequence_parallel)
        return rank_memory(Job(deeper, sequence, batch, software=MEGATRON), strategy)[0].activations

    scores = 5 * heads * sequence / (hidden * tensor)
    linear = 34 / tensor if sequence_parallel else 10 + 24 / tensor
    assert kept(2) - kept(1) == pytest.approx(sequence * batch * hidden * (linear + scores))


PEAKS = {  # GiB that are reserved: pytorch/torchtitan @31a17bf, benchmarks/llama3_h100_202412_torchtitan.md
    ("fsdp2", 8): 82.4,
    ("fsdp2", 128): 67.0,
    ("fsdp2-compiled", 8): 77.0,
    ("fsdp2-compiled", 128): 62.0,
}


def test_published_peaks_lie_where_it_is_said_and_never_above_what_is_predicted() -> None:
    found: dict[str, list[float]] = {}
    for row in read_table(TABLES / "torchtitan_h100.csv"):
        for name in PUBLISHED_PEAKS:
            job, strategy = job_of(row, TITAN_H100), strategy_of(row, TITAN_H100)
            (rank,) = rank_memory(replace(job, software=SOFTWARE[name]), strategy)
            peak = PEAKS[name, int(strategy.world_size)] * GIB
            assert peak <= rank.total * 1.001, (name, rank.total / GIB)
            counted = rank.total / (1 + reserved_share(SOFTWARE[name]))
            found.setdefault(name, []).append(peak / counted - 1)
    for name, (least, most) in PUBLISHED_PEAKS.items():
        assert (min(found[name]), max(found[name])) == pytest.approx((least, most), abs=0.002), name


@pytest.mark.parametrize("name", sorted(SOFTWARE))
def test_a_prediction_says_what_its_memory_is(name: str) -> None:
    model = Model(layers=4, hidden=1024, heads=16, vocab_rows=51200, max_sequence=2048)
    job = Job(model, 2048, 16, software=SOFTWARE[name])
    notes = " ".join(predict(job, Strategy(shard=8), load_cluster("h100_400g", 8)).notes)
    assert ("reserved" in notes) == (name != "phalanx")
    assert ("unknown" in notes) == (name not in (*PUBLISHED_PEAKS, "phalanx"))


def test_split_weights_over_many_hosts_are_said_to_be_too_fast() -> None:
    model = Model(layers=4, hidden=1024, heads=16, vocab_rows=51200, max_sequence=2048)
    job = Job(model, 2048, 512)
    for devices, said in ((128, False), (512, True)):
        done = predict(job, Strategy(shard=devices, zero=3), load_cluster("h100_400g", devices))
        assert any(note.startswith(f"ZeRO-3 over {devices // 8} hosts") for note in done.notes) == said
