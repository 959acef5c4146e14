"""`phalanx train` under `phalanx run`: a rank is killed, then a bit flips, and what is trained is the same bit for bit.

After the kill training goes on from memory; the host whose bit flips is blamed, and the job goes on from before it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.recovery.job import Job

from phalanx.checkpoint.keeper.keeper_start import VARIABLE, end_keeper
from phalanx.detect.corruption.copy_judge import judge_run
from phalanx.detect.corruption.digest_file import read_digests

STEPS, KILLED, FLIPPED = 30, 5, 15
GUARD_S = 300.0

SETTINGS = tiny.SETTINGS | {
    "train.steps": STEPS,
    "train.global_batch": 6,
    "train.micro_batch": 2,
    "parallel.replicate": 3,
    "checkpoint.every_steps": 10,
    "telemetry.digests_every": 10,
}
OF_THE_JOB = SETTINGS | {"checkpoint.memory_every_steps": 1}

# Each once in the life of the job; the bit is of rank 0, whose state is what checkpoints hold.
SCRIPT = f"""
import os, signal
from pathlib import Path
import torch
from phalanx.cli.main import main
from phalanx.train.training_run import Run

updated, here = Run.updated, Path(__file__).parent

def is_first(what):
    try:
        (here / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def disturbed(run):
    updated(run)
    now = run.ranks.rank, run.progress.step + 1
    if now == (1, {KILLED}) and is_first("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if now == (0, {FLIPPED}) and is_first("flipped"):
        run.state_tensors()["model.embedding"].view(torch.int32)[3, 3] ^= 1 << 20

Run.updated = disturbed
main()
"""


def losses(folder: Path) -> dict[int, list[float]]:
    """By step; a step that was done again has several."""
    found: dict[int, list[float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry: dict[str, Any] = json.loads(line)
        if entry["kind"] == "step":
            found.setdefault(entry["step"], []).append(entry["loss"])
    return found


@pytest.mark.slow
def test_a_killed_rank_and_a_flipped_bit_change_nothing_of_what_is_trained(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text("")
    words = tiny.overrides(tmp_path, tmp_path / "alone", SETTINGS)
    command = [sys.executable, "-m", "phalanx", "train", "tiny.toml", *words]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    alone = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=GUARD_S)
    assert alone.returncode == 0, alone.stderr
    (tmp_path / "keepers").mkdir(mode=0o700)
    keeper = tmp_path / "keepers" / "job"
    (tmp_path / "training.py").write_text(SCRIPT)
    script = ["training.py", "train", "tiny.toml", *tiny.overrides(tmp_path, tmp_path / "out", OF_THE_JOB)]
    try:
        with Job(tmp_path, ["--hosts", "3", "--workers-per-host", "1", "--", *script], {VARIABLE: str(keeper)}) as job:
            job.wait_for(lambda: job.commands[-1].poll() is not None, GUARD_S)
            assert job.commands[-1].returncode == 0, job.output
            failed, passed, running = job.events("worker-failed"), job.events("check-passed"), job.events("running")
            logs = sorted((job.run_folder / "logs" / "rank-0").glob("*.log"))
            told = "".join(path.read_text() for path in logs)
    finally:
        end_keeper(keeper)
    assert [event.attempt for event in running] == [1, 2, 3]
    begun = re.search(r"going on from the memory of .*\(step (\d+) of", told)
    assert begun and 1 <= int(begun[1]) <= KILLED, told
    failures = [event.fields for event in failed if event.attempt == 2 and not event.fields.get("follows")]
    assert [(one["rank"], one["fault"]) for one in failures] == [(0, "host")], failures
    assert passed, "the host of rank 0 was not checked"
    verdict = judge_run(tmp_path / "out")
    assert verdict.blamed_ranks == (0,) and 10 <= int(verdict.detections[0].figures["last_agreed_step"]) < FLIPPED
    # Whichever states were left, in memory or in storage: it went on from none with the flipped bit.
    done, plain = losses(tmp_path / "out"), losses(tmp_path / "alone")
    assert all(len(set(found)) == 1 for step, found in done.items() if step <= FLIPPED)  # those done twice, too
    assert {step: found[-1:] for step, found in done.items()} == plain and len(plain) == STEPS
    assert read_digests(tmp_path / "out")[STEPS].of == read_digests(tmp_path / "alone")[STEPS].of
