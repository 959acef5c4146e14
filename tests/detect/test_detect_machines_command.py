"""`phalanx detect machines` from files and a run's folder, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from phalanx.cli.detect_machines import command
from phalanx.detect.minder.machine_judge import judge_run
from phalanx.detect.monitoring.metric_table import MetricTable
from phalanx.detect.monitoring.table_files import write_table

METRICS = ("gpu_duty_cycle", "gpu_power_draw", "cpu_usage")


@pytest.fixture
def table() -> MetricTable:
    random = np.random.default_rng(0)
    levels = np.array([0.95, 400, 0.2])[:, None, None]
    values = (levels * (1 + 0.03 * random.standard_normal((3, 6, 420)))).astype(np.float32)
    values[:2, 4, 120:] *= 0.1
    return MetricTable(values, METRICS, tuple(f"h{one}" for one in range(6)), 1_700_000_000.0)


def test_the_faulty_machine_of_a_file_is_named_in_the_first_line(table: MetricTable, tmp_path: Path) -> None:
    name = "metrics.parquet"
    write_table(table, tmp_path / name)
    shown = CliRunner().invoke(command, [str(tmp_path / name)], standalone_mode=False)
    assert shown.return_value == 1, shown.output
    first, *rest = shown.output.splitlines()
    assert first.startswith("h4 differs from the other machines in gpu_") and ", others " in first
    assert any(line.startswith("  next: run `phalanx check` on h4") for line in rest)
    as_json = CliRunner().invoke(command, [str(tmp_path / name), "--json"], standalone_mode=False)
    (found,) = json.loads(as_json.output)["detections"]
    assert found["who"][0]["hosts"] == ["h4"] and found["figures"]["metric"].startswith("gpu_")


def test_numbers_may_be_set_and_machines_chosen(table: MetricTable, tmp_path: Path) -> None:
    path = tmp_path / "metrics.parquet"
    write_table(table, path)
    (tmp_path / "policy.toml").write_text("continuity_s = 400\n")
    longer = CliRunner().invoke(command, [str(path), "--policy", str(tmp_path / "policy.toml")], standalone_mode=False)
    assert longer.return_value == 3 and "too few" in longer.output
    few = CliRunner().invoke(command, [str(path), "--hosts", "h4,h5"], standalone_mode=False)
    assert few.return_value == 3 and "2 hosts cannot be compared" in few.output
    wrong = CliRunner().invoke(command, [str(path), "continuity=1"], standalone_mode=False)
    assert wrong.exception is not None and "continuity_s" in str(wrong.exception)


def test_a_run_without_counters_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "telemetry" / "spans").mkdir(parents=True)
    verdict = judge_run(tmp_path)
    assert verdict.exit_status == 3 and not verdict.detections and ";" in verdict.abstains[0]
