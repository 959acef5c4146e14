"""`phalanx train` under `phalanx run`: a rank is killed, training goes on from the host's memory, bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.recovery.job import Job

from phalanx.checkpoint.keeper.keeper_start import VARIABLE, end_keeper

STEPS = 40
GUARD_S = 240.0

SETTINGS = tiny.SETTINGS | {
    "train.steps": STEPS,
    "parallel.replicate": 2,
    "checkpoint.every_steps": 100_000,  # none on the disk but the last
    "checkpoint.memory_every_steps": 1,
    "logging.every_steps": 1,
}


class TrainJob(Job):
    @property
    def name(self) -> str:
        return "out"  # that of the training


def losses(folder: Path) -> dict[int, list[float]]:
    """By step; a step that was done again has several."""
    path = folder / "metrics.jsonl"
    found: dict[int, list[float]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        entry: dict[str, Any] = json.loads(line)
        if entry["kind"] == "step":
            found.setdefault(entry["step"], []).append(entry["loss"])
    return found


def output(job: Job, rank: int) -> str:
    """What a rank has written so far, in all attempts."""
    return "".join(path.read_text() for path in sorted((job.run_folder / "logs" / f"rank-{rank}").glob("*.log")))


def undisturbed(folder: Path, environ: dict[str, str]) -> dict[int, list[float]]:
    """The losses of the same training, started by `phalanx train` alone."""
    (folder / "tiny.toml").write_text("")
    words = tiny.overrides(folder, folder / "alone", SETTINGS)
    command = [sys.executable, "-m", "phalanx", "train", "tiny.toml", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=GUARD_S)
    assert done.returncode == 0, done.stderr
    return losses(folder / "alone")


@pytest.mark.slow
def test_training_goes_on_from_memory_after_a_kill_bit_for_bit(tmp_path: Path) -> None:
    keepers = tmp_path / "keepers"
    keepers.mkdir(mode=0o700)
    plain = undisturbed(tmp_path, {**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: str(keepers / "alone")})
    assert sorted(plain) == list(range(1, STEPS + 1))
    overrides = tiny.overrides(tmp_path, tmp_path / "out", SETTINGS)
    words = [
        "--workers-per-host",
        "2",
        "--set",
        "run.policy.joining_check=passive",
        "-m",
        "phalanx",
        "train",
        "tiny.toml",
        *overrides,
    ]
    try:
        with TrainJob(tmp_path, words, {VARIABLE: str(keepers / "job")}) as job:
            job.wait_for(lambda: len(losses(tmp_path / "out")) >= 5, GUARD_S)
            pid = job.wait_for(lambda: job.rank_pid(1))
            os.kill(pid, signal.SIGKILL)
            job.wait_for(lambda: job.commands[-1].poll() is not None, GUARD_S)
            assert job.commands[-1].returncode == 0, job.output
            told = output(job, 0)
            running = job.events("running")
    finally:
        end_keeper(keepers / "job")
        end_keeper(keepers / "alone")
    begun = re.search(r"going on from the memory of .*\(step (\d+) of", told)
    assert begun and int(begun[1]) >= 1, told
    assert [event.attempt for event in running] == [1, 2]
    done = losses(tmp_path / "out")
    assert {step: found[-1] for step, found in done.items()} == {step: found[-1] for step, found in plain.items()}
    assert all(len(set(found)) == 1 for found in done.values())  # steps that were done twice gave the same
