"""What judges find in a job of the real command: one verdict each, with the right host, wherever people look."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.recovery.job import Job

from phalanx.run.incidents.detections_file import read_detections

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from phalanx.core.progress import own_progress

dist.init_process_group("gloo")
rank, steps, slow = dist.get_rank(), int(sys.argv[1]), int(sys.argv[2])
own_s = 0.06 if rank == slow else 0.02
page = own_progress(os.environ, int(os.environ["PHALANX_RUN_ATTEMPT"]))
for step in range(1, steps + 1):
    time.sleep(own_s)
    dist.all_reduce(torch.ones(4))
    page.step(step, busy_ns=int(own_s * 1e9))
    if step == 5:
        open(f"begun-{rank}", "w").close()
dist.destroy_process_group()
"""

# A host counts as silent after three heartbeats and a half, and a busy machine lets processes wait for a second and
# more: shorter limits than these would call that a hang.
QUICK = (
    *("heartbeat_s=0.5", "policy.joining_check=passive"),
    *("slow.block_steps=4", "slow.min_blocks=2", "slow.per_steps=1000", "slow.false_alarms=0.5"),
)
STOPPED_S = "limits.stopped_s=4.0"
GUARD_S = 280.0


def job(folder: Path, steps: int, slow: int, *more: str) -> Job:
    """Three hosts of one rank each, of which one (-1: none) takes three times as long by itself."""
    (folder / "train.py").write_text(SCRIPT)
    settings = [word for setting in (*QUICK, *more) for word in ("--set", f"run.{setting}")]
    return Job(folder, ["--hosts", "3", *settings, "--", "train.py", str(steps), str(slow)])


def said(job: Job, *words: str) -> str:
    """What a command about the job says."""
    command = [sys.executable, "-m", "phalanx.cli.main", "run", *words, "--folder", str(job.run_folder)]
    return subprocess.run(command, capture_output=True, text=True, env=job.environment(), timeout=GUARD_S).stdout


def verdicts(job: Job) -> list[dict[str, Any]]:
    """The events in the journal by now."""
    return [event.fields for event in job.events("detected")]


def hosts_of(verdict: dict[str, Any]) -> set[str]:
    return {host for who in verdict["found"]["who"] for host in who["hosts"]}


def trains(job: Job) -> bool:
    return all((job.folder / f"begun-{rank}").exists() for rank in range(3))


@pytest.fixture(name="slow_job")
def slow_job_fixture(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path, 100_000, 2) as found:
        yield found


@pytest.mark.campaign
def test_a_slow_host_is_one_verdict_in_events_status_and_files(slow_job: Job) -> None:
    slow_job.wait_for(lambda: trains(slow_job) and verdicts(slow_job), GUARD_S)
    seen = json.loads(said(slow_job, "status", "--json"))
    (host,) = [one["name"] for one in seen["hosts"] if one["ranks"] == [2]]
    (kept,) = seen["detections"]
    assert kept["judge"] == "stragglers" and hosts_of(kept) == {host} and kept["found"]["advice"] == "check"
    assert 2.5 < kept["found"]["figures"]["slowdown"] < 3.5
    slow_job.wait_for(lambda: read_detections(slow_job.run_folder), GUARD_S)
    assert f"{host} takes" in said(slow_job, "incidents")
    assert len(verdicts(slow_job)) == 1 and not slow_job.events("host-gone", "drain-asked", "evict-asked")


@pytest.mark.campaign
def test_a_hang_is_one_verdict_and_its_report_has_the_host(tmp_path: Path) -> None:
    with job(tmp_path, 100_000, -1, STOPPED_S) as hung:
        hung.wait_for(lambda: trains(hung), GUARD_S)
        seen = json.loads(said(hung, "status", "--json"))
        (host,) = [one["name"] for one in seen["hosts"] if one["ranks"] == [1]]
        pid = hung.rank_pid(1)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        hung.wait_for(lambda: verdicts(hung), GUARD_S)
        (kept,) = hung.wait_for(lambda: read_detections(hung.run_folder), GUARD_S)
        assert kept.judge == "hang" and kept.found.blamed_hosts == (host,) and kept.found.blamed_ranks == (1,)
        assert kept.incident == 1
        page = hung.run_folder / "incidents" / "0001.md"
        hung.wait_for(lambda: host in page.read_text() and "is stopped" in page.read_text(), GUARD_S)
        assert "judge of hang" in said(hung, "status")
        assert [hosts_of(one) for one in verdicts(hung)] == [{host}]


@pytest.mark.campaign
def test_of_a_healthy_job_there_is_none(tmp_path: Path) -> None:
    with job(tmp_path, 150, -1, "judges.every_s=1.0") as healthy:
        healthy.wait_for(lambda: healthy.commands[-1].poll() is not None, GUARD_S)
        assert healthy.commands[-1].returncode == 0, healthy.output
        assert verdicts(healthy) == [] and read_detections(healthy.run_folder) == []
        assert "judge" not in healthy.output
