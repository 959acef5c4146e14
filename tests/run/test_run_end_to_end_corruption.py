"""A bit flips on one rank under `phalanx run`: its host is blamed, and the job goes on from before, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiny
from support.recovery.job import Job

from phalanx.checkpoint.keeper.keeper_start import VARIABLE, end_keeper
from phalanx.detect.corruption.copy_judge import judge_run
from phalanx.detect.corruption.digest_file import read_digests

GUARD_S = 300.0

SETTINGS = tiny.SETTINGS | {
    "train.steps": 30,
    "train.global_batch": 6,
    "train.micro_batch": 2,
    "parallel.replicate": 3,
    "checkpoint.every_steps": 10,
    "checkpoint.memory_every_steps": 1,
    "telemetry.digests_every": 10,
}

# Of rank 0, whose state is what checkpoints hold, and once in the life of the job.
SCRIPT = """
import os, sys
from pathlib import Path
import torch
from phalanx.cli.main import main
from phalanx.train.training_run import Run

updated, flipped = Run.updated, Path({marker!r})

def flipping(run):
    updated(run)
    if run.ranks.rank == 0 and run.progress.step + 1 == 15 and not flipped.exists():
        flipped.touch()
        run.state_tensors()["model.embedding"].view(torch.int32)[3, 3] ^= 1 << 20

Run.updated = flipping
main()
"""


@pytest.mark.campaign
@pytest.mark.slow
def test_its_host_is_blamed_and_the_job_goes_on_from_before(tmp_path: Path) -> None:
    keepers = tmp_path / "keepers"
    keepers.mkdir(mode=0o700)
    (tmp_path / "tiny.toml").write_text("")
    words = tiny.overrides(tmp_path, tmp_path / "alone", SETTINGS)
    command = [sys.executable, "-m", "phalanx", "train", "tiny.toml", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: str(keepers / "alone")}
    plain = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=GUARD_S)
    assert plain.returncode == 0, plain.stderr
    (tmp_path / "training.py").write_text(SCRIPT.format(marker=str(tmp_path / "flipped")))
    script = ["training.py", "train", "tiny.toml", *tiny.overrides(tmp_path, tmp_path / "out", SETTINGS)]
    try:
        words = ["--hosts", "3", "--workers-per-host", "1", "--set", "run.policy.joining_check=passive"]
        with Job(tmp_path, [*words, "--", *script], {VARIABLE: str(keepers / "job")}) as job:
            job.wait_for(lambda: job.commands[-1].poll() is not None, GUARD_S)
            assert job.commands[-1].returncode == 0, job.output
            failed, passed = job.events("worker-failed"), job.events("check-passed")
    finally:
        end_keeper(keepers / "job")
        end_keeper(keepers / "alone")
    failures = [event.fields for event in failed if not event.fields.get("follows")]
    assert [(one["rank"], one["fault"]) for one in failures] == [(0, "host")], failures
    assert passed, "the host of rank 0 was not checked"
    verdict = judge_run(tmp_path / "out")
    assert verdict.blamed_ranks == (0,) and 10 <= int(verdict.detections[0].figures["last_agreed_step"]) < 15
    # Whichever states were left, in memory or in storage: it went on from none with the flipped bit.
    mended, healthy = read_digests(tmp_path / "out")[30].of, read_digests(tmp_path / "alone")[30].of
    assert mended == healthy
