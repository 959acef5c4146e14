"""A rank that really computes longer than its peers: the judge of spans, beside the job, names its host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.recovery.job import Job

from phalanx.detect.incident_history import read_histories
from phalanx.run.driver.job_hosts import Placement
from phalanx.run.driver.judge_process import Question, answers
from phalanx.run.driver.run_judges import OF_A_RUN
from phalanx.run.incidents.detections_file import read_detections

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from phalanx.core.progress import own_progress
from phalanx.telemetry import record_spans

dist.init_process_group("gloo")
rank, steps, slow = dist.get_rank(), int(sys.argv[1]), int(sys.argv[2])
attempt, host = int(os.environ["PHALANX_RUN_ATTEMPT"]), os.environ["PHALANX_HOST"]
if attempt == 1 and rank == slow:
    Path("slow-host").write_text(host)
dist.barrier()
is_slow = Path("slow-host").exists() and Path("slow-host").read_text() == host
page, spans = own_progress(os.environ, attempt), record_spans("run")
first = 1 if attempt == 1 else 1000
for step in range(first, first + steps):
    own_s = 0.06 if is_slow and step > 15 else 0.02
    with spans.step(step):
        with spans.span("model", kind="forward"):
            time.sleep(own_s / 2)
        with spans.span("model", kind="backward"):
            time.sleep(own_s / 2)
        with spans.span("all-reduce", group=dist.group.WORLD):
            dist.all_reduce(torch.ones(4))
    page.step(step)
    if step % 20 == 0:
        Path(f"step-{step}").touch()
spans.close()
dist.destroy_process_group()
"""

QUICK = ("heartbeat_s=0.2", "policy.joining_check=passive", "judges.every_s=2.0", "judges.limit_s=380")
GUARD_S = 400.0  # judges give way to everything else on a busy machine


def job(folder: Path, steps: int, slow: int, *more: str, spares: int = 0) -> Job:
    """Three hosts of one rank each, of which one (-1: none) takes three times as long after 15 steps."""
    (folder / "train.py").write_text(SCRIPT)
    settings = [word for setting in (*QUICK, *more) for word in ("--set", f"run.{setting}")]
    words = ["--hosts", "3", "--spares", str(spares), *settings]
    return Job(folder, [*words, "--", "train.py", str(steps), str(slow)])


def said(job: Job, *words: str) -> str:
    """What a command about the job says."""
    command = [sys.executable, "-m", "phalanx.cli.main", "run", *words, "--folder", str(job.run_folder)]
    return subprocess.run(command, capture_output=True, text=True, env=job.environment(), timeout=GUARD_S).stdout


def verdicts(job: Job) -> list[dict[str, Any]]:
    """The events in the journal by now."""
    return [event.fields for event in job.events("detected")]


def named_slow(job: Job) -> tuple[str, dict[str, Any]]:
    """The slow host, and the first verdict, once there is one."""
    slow_host = job.wait_for(lambda: (job.folder / "slow-host").exists() and (job.folder / "slow-host").read_text())
    (verdict,) = job.wait_for(lambda: verdicts(job), GUARD_S)
    return slow_host, verdict


def host_of_rank(status: dict[str, Any], rank: int) -> str:
    (name,) = [one["name"] for one in status["hosts"] if rank in one["ranks"]]
    return str(name)


def test_a_slow_rank_is_named_once_with_the_host_of_the_job_and_stays_where_it_is(tmp_path: Path) -> None:
    with job(tmp_path, 100_000, 2) as slow:
        slow_host, verdict = named_slow(slow)
        found = verdict["found"]
        assert verdict["judge"] == "stragglers" and found["what"] == "slow rank" and found["advice"] == "evict"
        assert [(one["ranks"], one["hosts"]) for one in found["who"]] == [([2], [slow_host])]
        assert found["since"]["step"] >= 5 and found["figures"]["slowdown"] > 1.3
        status = json.loads(said(slow, "status", "--json"))
        assert [one["judge"] for one in status["detections"]] == ["stragglers"]
        assert host_of_rank(status, 2) == slow_host and f"rank 2 (host {slow_host}" in found["sentence"]
        assert f"`phalanx run evict {slow_host}`" in said(slow, "incidents")
        (kept,) = slow.wait_for(lambda: read_detections(slow.run_folder), GUARD_S)
        assert kept.found.blamed_hosts == (slow_host,)
        assert [one.host for one in read_histories([slow.run_folder])] == [slow_host]
        # The judges look again, and the same is no news; nothing is done that the policy does not ask for.
        step = status["step"]
        slow.wait_for((tmp_path / f"step-{(step + 80) // 20 * 20}").exists, GUARD_S)
        assert verdicts(slow) == [verdict] and not slow.events("host-gone", "drain-asked", "evict-asked")


@pytest.mark.campaign
def test_a_policy_that_replaces_slow_hosts_has_a_spare_take_its_place(tmp_path: Path) -> None:
    with job(tmp_path, 100_000, 2, "policy.replace_slow=true", spares=1) as slow:
        slow_host, verdict = named_slow(slow)
        slow.wait_for(lambda: [event.attempt for event in slow.events("running")] == [1, 2], GUARD_S)
        status = json.loads(said(slow, "status", "--json"))
        assert slow_host not in [one["name"] for one in status["hosts"] if one["ranks"]]
        assert "takes the ranks of" in slow.output and slow_host in slow.output
        # The host that came in its place has the same rank, and is not taken for it.
        slow.wait_for((tmp_path / "step-1120").exists, GUARD_S)
        assert verdicts(slow) == [verdict]


@pytest.mark.campaign
def test_of_a_healthy_job_nobody_is_named(tmp_path: Path) -> None:
    with job(tmp_path, 250, -1) as healthy:
        healthy.wait_for(lambda: healthy.commands[-1].poll() is not None, GUARD_S)
        assert healthy.commands[-1].returncode == 0, healthy.output
        assert verdicts(healthy) == [] and read_detections(healthy.run_folder) == []
    question = Question(
        kind="run", folder=str(healthy.run_folder), names=OF_A_RUN, placement=Placement(("a", "b", "c"))
    )
    said_of_it = {one.judge: one for one in answers(question)}  # whatever the judges beside it have had time for
    assert "250 steps of 3 ranks" in said_of_it["drift"].looked_at and said_of_it["stragglers"].looked_at
    assert not [one for verdict in said_of_it.values() for one in verdict.detections]
