"""The benchmark of silent corruption works: its figures are of real runs, and small ones come out right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "detect_corruption.py"

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("part", ["flips", "detectors"])
def test_a_few_faults_are_found_and_named(part: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--part", part, "--json", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    rows = json.loads(out.read_text())[part]
    for row in rows:
        if part == "flips":
            assert row["found"] == row["right_rank"] == row["right_tensor"] == row["trials"] == 4
        else:
            assert row["digests names"] == row["replay names"] == row["faults"]
    assert rows
