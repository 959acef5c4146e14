"""Tables that were collected when the planner was done: their errors do not grow, and each row is what it says."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import phalanx
from phalanx.plan.predict import predict
from phalanx.plan.validate.assumptions import SETTINGS
from phalanx.plan.validate.compare import TableResult, compare
from phalanx.plan.validate.jobs import cluster_of, job_of, strategy_of
from phalanx.plan.validate.later import (
    ALTERNATIVES_LATER,
    BLOOM_FP16,
    FOUNDRY_H100,
    INTERNLM,
    LATER,
    NEMO_GPT3,
    NEMO_LLAMA,
    NEMO_LLAMA_8B,
)
from phalanx.plan.validate.null import published_flops
from phalanx.plan.validate.rows import TABLES, Row, read_table

LIMITS = {
    # Mean and largest absolute error; a change that makes either larger has to say why.
    "nemo_gpt3_175b": (0.075, 0.09),
    "nemo_llama31_8b": (0.12, 0.125),
    "nemo_llama31_large": (0.078, 0.098),
    "nemo_nemotron4_15b": (0.085, 0.108),
    "nemo_nemotron4_340b": (0.05, 0.058),
    "llama3_405b": (0.12, 0.13),
    "foundry_h100": (0.113, 0.28),
    "foundry_a100": (0.095, 0.28),
    "torchtitan_a100": (0.175, 0.25),
    "torchtitan_h100": (0.35, 0.35),
    "torchtitan_h100_eager": (0.415, 0.42),
    "internlm_7b": (0.182, 0.495),
    "bloom_fp16": (0.115, 0.285),
    "bloom_bf16": (0.104, 0.162),
    "zero_bubble_1f1b": (0.108, 0.14),
}


@pytest.fixture(scope="module")
def results() -> dict[str, TableResult]:
    return {setting.table: compare(setting, with_spread=False) for setting in LATER}


@pytest.mark.parametrize("table", LIMITS)
def test_errors_of_later_tables_do_not_grow(results: dict[str, TableResult], table: str) -> None:
    mean, largest = LIMITS[table]
    assert results[table].mean_error < mean
    assert np.abs(results[table].errors).max() < largest


def test_every_later_table_has_limits_and_is_no_earlier_one() -> None:
    names = [setting.table for setting in LATER]
    assert set(LIMITS) == set(names) and len(set(names)) == len(names)
    assert not set(names) & {setting.table for setting in SETTINGS}
    assert set(ALTERNATIVES_LATER) <= set(names)


def test_rows_of_later_tables_are_told_apart_and_name_their_source() -> None:
    rows = [row.row_id for setting in LATER for row in read_table(TABLES / f"{setting.table}.csv")]
    assert len(set(rows)) == len(rows) == 234
    for setting in LATER:
        comment = (TABLES / f"{setting.table}.csv").read_text().splitlines()[0]
        assert comment.startswith("# ") and (" @" in comment or "arXiv" in comment or "same tables" in comment)


def test_nearer_scales_of_one_run_are_met_alike(results: dict[str, TableResult]) -> None:
    """Whatever a program's common factor is, from 64 to 2,048 GPUs the errors of its rows stay within five points."""
    for table in ("nemo_gpt3_175b", "nemo_llama31_8b", "nemo_nemotron4_340b"):
        errors = results[table].errors
        assert errors.max() - errors.min() < 0.05, table


def test_a_row_may_say_more_of_its_model_and_layout() -> None:
    row = next(row for row in read_table(TABLES / "nemo_llama31_large.csv") if "70b-64" in row.row_id)
    job, strategy = job_of(row, NEMO_LLAMA), strategy_of(row, NEMO_LLAMA)
    assert (job.model.kv_heads, job.model.mlp_width, job.model.gated) == (8, 28672, True)
    assert (strategy.context, strategy.tensor, strategy.pipeline, strategy.data) == (2, 4, 4, 2)
    split = next(row for row in read_table(TABLES / "internlm_7b.csv") if row.row_id == "internlm-7b-tp1-zero8-64")
    assert (strategy_of(split, INTERNLM).shard, strategy_of(split, INTERNLM).replicate) == (8, 8)


def test_llama_3s_seconds_come_from_its_flops() -> None:
    row = read_table(TABLES / "llama3_405b.csv")[0]
    weights = 126 * (16384 * 144 * 128 + 16384**2 + 3 * 16384 * 53248) + 128256 * 16384
    flops = 2048 * 8192 * (6 * weights + 12 * 126 * 8192 * 16384)
    assert row.step_s == pytest.approx(flops / (430e12 * 8192), rel=1e-4)


def _seconds(row: Row, path: str, **changes: object) -> float:
    setting = replace(FOUNDRY_H100 if "mpt" in row.row_id else BLOOM_FP16, **changes)  # type: ignore[arg-type]
    return predict(job_of(row, setting), strategy_of(row, setting), cluster_of(row, setting)).seconds(path)


def test_older_attention_takes_as_much_longer_as_said() -> None:
    row = read_table(TABLES / "foundry_h100.csv")[0]
    plain = _seconds(row, "compute/attention", attention_ratio=(1.0, 1.0))
    assert _seconds(row, "compute/attention", attention_ratio=(3.0, 3.0)) == pytest.approx(3 * plain, rel=0.01)
    assert _seconds(row, "compute/mlp", attention_ratio=(3.0, 3.0)) == _seconds(row, "compute/mlp")


def test_kernels_that_are_launched_one_after_another_leave_gaps() -> None:
    row = read_table(TABLES / "bloom_fp16.csv")[0]
    gaps = [_seconds(row, "compute/gaps", blocking_launches=blocking) for blocking in (False, True)]
    assert gaps[1] == pytest.approx(51 * gaps[0], rel=0.01)


def test_published_flops_are_those_of_the_publications() -> None:
    """As NVIDIA/dgxc-benchmarking counts them for one sequence of GPT-3 175B, Llama 3.1 8B and 70B."""
    for table, setting, flops in (
        ("nemo_gpt3_175b", NEMO_GPT3, 2.20e15),
        ("nemo_llama31_8b", NEMO_LLAMA_8B, 4.74e14),
        ("nemo_llama31_large", NEMO_LLAMA, 3.94e15),
    ):
        row = read_table(TABLES / f"{table}.csv")[0]
        assert published_flops(job_of(row, setting)) / row.global_batch == pytest.approx(flops, rel=0.003)


def test_tables_are_part_of_what_is_installed() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["phalanx"]
    names = [path.relative_to(Path(phalanx.__file__).parent) for path in TABLES.iterdir()]
    assert names and all(any(name.match(pattern) for pattern in patterns) for name in names)
