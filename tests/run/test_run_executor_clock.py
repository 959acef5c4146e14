"""The wall clock of the run room can be made to jump; the one that durations are measured by cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from phalanx.faults.host_faults import VARIABLE, set_offset

SHOW = "import time; from phalanx.run.clock import read_clocks; now = read_clocks(); print(now.unix_s - time.time())"


def test_the_wall_clock_jumps_where_it_is_told_to(tmp_path: Path) -> None:
    set_offset(tmp_path / "offset", 3600.0)
    for environ, wanted in (({VARIABLE: str(tmp_path / "offset")}, 3600), ({}, 0)):
        shown = subprocess.run(
            [sys.executable, "-c", SHOW], env={**os.environ, **environ}, capture_output=True, text=True, check=True
        )
        assert abs(float(shown.stdout) - wanted) < 30
