"""Ranks with torch: forked from a template that imported it, joined in gloo groups, ended by each other's errors."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.launch.cores import local_shares
from phalanx.launch.local_ranks import launch_local

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

RANKS = 4
GUARD_S = 240.0


def test_forked_ranks_join_compute_and_have_their_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What training imports is preloaded too, so this fails when anything of it starts a thread on import."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    report = io.StringIO()
    preload = ["phalanx.train.session", "torch.distributed"]
    arguments = (str(tmp_path),)
    status = launch_local(RANKS, "gloo_targets:all_reduce", arguments, preload=preload, report=report)
    assert (status, report.getvalue()) == (0, "")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for rank in ranks:
        assert rank["total"] == sum(2 * 64 * value for value in range(RANKS))
        assert rank["threads"] == rank["threads_in_a_thread"] == local_shares(RANKS)[0].threads
        assert list(rank["phases"]) == ["template", "fork", "setup"]
    assert len({rank["draw"] for rank in ranks}) == RANKS


@pytest.mark.parametrize("number", [0, signal.SIGKILL])
def test_the_first_of_ranks_that_need_each_other_is_named(number: int) -> None:
    report = io.StringIO()
    # Its own word ends the wait for it, however late it is heard on a machine that has much to do.
    status = launch_local(3, "gloo_targets:steps", (1, int(number)), report=report, settle_s=GUARD_S)
    lines = report.getvalue().splitlines()
    end = "ValueError: a rank that raises at step 5" if number == 0 else "killed by SIGKILL"
    (mark,) = (line for line in lines if line.startswith("rank 1 of 3 on "))
    assert mark.endswith(end)
    assert status == (1 if number == 0 else 128 + number)
    assert "\n".join(lines).count("Traceback") == (1 if number == 0 else 0)
    assert all(line.startswith(("  rank 0 then: ", "  rank 2 then: ")) for line in lines[: lines.index(mark) - 1])


TORCHRUN_SCRIPT = """
import datetime, os, sys
from torch.distributed import TCPStore
from phalanx.launch.environment import worker_environment
from phalanx.launch.rank_failures import errors_named
from phalanx.core.layout import Layout
worker = worker_environment()
assert (worker.launcher, worker.world_size, worker.local_world_size, worker.attempt) == ("torchrun", 2, 2, 0)
store = TCPStore(worker.host, worker.port, is_master=worker.hosts_store, timeout=datetime.timedelta(seconds=30))
store.set(f"here {worker.rank}", "yes")
with errors_named(worker, Layout(tensor=2)):
    if store.get(f"here {1 - worker.rank}") == b"yes" and worker.rank == 1:
        raise ValueError("under torchrun")
"""


@pytest.mark.campaign
@pytest.mark.slow
def test_workers_of_a_real_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode != 0
    assert "(layout tp2: tensor 1): ValueError: under torchrun" in done.stderr
    assert "AssertionError" not in done.stderr
