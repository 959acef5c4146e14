"""The script that measures judges of drift and losses runs, and what it finds is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "detect_drift.py"


@pytest.mark.campaign
def test_quick_cases_are_found_and_named(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(out)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(out.read_text())
    assert all(row["right"] and row["without_spans"] for row in found["drift"])
    assert all(row["told"] == row["onsets"] == row["causes"] == 2 for row in found["several"])
    assert found["healthy"]["alarms_usual"] == 0
    assert not found["loss"]["false_alarms"]
    large = [row for row in found["loss"]["trouble"] if row["size"] >= 1]
    assert all(row["class_right"] == row["of"] for row in large)
    assert all(20 <= after <= 40 for row in found["delay"] for after in row["after_steps"])
    assert "Steps from a jump until it is found" in shown
