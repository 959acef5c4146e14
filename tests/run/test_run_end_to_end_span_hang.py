"""A rank that really hangs: the driver's own evidence and the judge of spans name it together, in one verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.recovery.job import Job

SCRIPT = """
import os, threading, time
import torch, torch.distributed as dist
from phalanx.core.progress import own_progress
from phalanx.telemetry import record_spans

def wait_for_ever():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["PHALANX_RUN_ATTEMPT"])
page, spans = own_progress(os.environ, attempt), record_spans("run")
for step in range(1, 100_000):
    with spans.step(step):
        with spans.span("model", kind="forward"):
            time.sleep(0.02)
        if rank == 1 and step == 50 and attempt == 1:
            wait_for_ever()
        with spans.span("all-reduce", group=dist.group.WORLD):
            dist.all_reduce(torch.ones(4))
    page.step(step)
"""
# The judge of spans is asked after 5.5 s without a movement, and gives way to everything else.
QUICK = ("heartbeat_s=0.2", "policy.joining_check=passive", "limits.floor_s=40.0")
GUARD_S = 240.0


def said(job: Job, *words: str) -> str:
    command = [sys.executable, "-m", "phalanx.cli.main", "run", *words, "--folder", str(job.run_folder)]
    return subprocess.run(command, capture_output=True, text=True, env=job.environment(), timeout=GUARD_S).stdout


@pytest.mark.campaign
@pytest.mark.slow
def test_spans_say_what_the_hung_rank_never_entered_in_the_verdict_of_the_driver(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    settings = [word for setting in QUICK for word in ("--set", f"run.{setting}")]
    with Job(tmp_path, ["--hosts", "3", *settings, "--", "train.py"]) as hung:
        hung.wait_for(lambda: (hung.run_folder / "telemetry").exists(), GUARD_S)
        (event,) = hung.wait_for(lambda: hung.events("detected"), GUARD_S)
        (running,) = hung.events("running")
        found = event.fields["found"]
        assert event.fields["judge"] == "hang" and [one["ranks"] for one in found["who"]] == [[1]]
        ((host,),) = [one["hosts"] for one in found["who"]]
        by_spans = f"so by spans: rank 1 (host {host}) never entered all-reduce 50"
        assert [why for why in found["why"] if why.startswith(by_spans)], found
        assert found["confidence"] > 0.9 and running.attempt == 1
        page = hung.run_folder / "incidents" / "0001.md"
        hung.wait_for(lambda: by_spans in page.read_text(), GUARD_S)
        assert by_spans in said(hung, "incidents")
        hung.wait_for(lambda: len(hung.events("running")) == 2, GUARD_S)
        assert len(hung.events("detected")) == 1
