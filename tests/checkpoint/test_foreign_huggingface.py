"""`transformers.Trainer` killed and resumed with our callback trains on as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TRAINER = Path(__file__).parent / "foreign_trainer.py"


@pytest.mark.slow
@pytest.mark.parametrize(("kill_at", "start"), [(9, 8), (15, 12)], ids=["mid-epoch", "epoch border"])
def test_killed_and_resumed_losses_are_the_same(tmp_path: Path, kill_at: int, start: int) -> None:
    # An epoch is 22 samples, which are 6 steps of 4: step 8 is in the middle of one, step 12 at an end.
    command = [sys.executable, str(TRAINER), str(tmp_path), str(kill_at), "mode=blocking", "every_steps=4"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    through, killed, resumed = json.loads(done.stdout.splitlines()[-1])
    assert killed == -9
    assert (through["start"], resumed["start"]) == (0, start)
    assert len(through["history"]) == 16
    assert resumed["history"] == through["history"]
    assert resumed["weights"] == through["weights"]
