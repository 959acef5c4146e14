"""The real command with a script of Hugging Face's Trainer that knows nothing of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.recovery.job import Job

SCRIPT = Path(__file__).parents[2] / "examples" / "run_hugging_face.py"
STEPS = 30
SAVED_EVERY = 20


def job_in(folder: Path) -> Job:
    folder.mkdir()
    return Job(folder, ["--hosts", "2", "--workers-per-host", "1", "--", str(SCRIPT), "out", str(STEPS)])


def losses(job: Job) -> list[str]:
    """What the Trainer has logged on rank 0, line by line."""
    logs = sorted((job.run_folder / "logs" / "rank-0").glob("*.log"))
    return [line for log in logs for line in log.read_text().split("\n") if "'loss'" in line]


@pytest.mark.campaign
@pytest.mark.slow
def test_a_killed_rank_changes_nothing_of_what_is_trained(tmp_path: Path) -> None:
    straight, killed = job_in(tmp_path / "straight"), job_in(tmp_path / "killed")
    with straight as job:
        assert job.commands[-1].wait(300) == 0, job.output
    with killed as job:
        saved = job.folder / "out" / f"checkpoint-{SAVED_EVERY}" / "trainer_state.json"
        job.wait_for(lambda: saved.exists() and len(losses(job)) > SAVED_EVERY + 2 and job.events("started"))
        os.kill(job.wait_for(lambda: job.rank_pid(1)), signal.SIGKILL)
        assert job.commands[-1].wait(300) == 0, job.output
        # The other rank may say that its peer is gone before it is killed.
        assert [event.fields["rank"] for event in job.events("worker-failed") if not event.fields["follows"]] == [1]
        assert len(losses(job)) > STEPS - 5  # some were logged twice
        assert job.processes() == []
    results = [(job.folder / "out" / "model.safetensors").read_bytes() for job in (straight, killed)]
    assert results[0] == results[1]
