"""What a run is judged to be by its files, its processes and their pages."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import UserError
from phalanx.core.progress import ProgressWriter
from phalanx.dashboard.data_source import DataSource
from phalanx.ipc.processes import identity_of
from phalanx.telemetry.living_ranks import LIVING
from phalanx.telemetry.loggers import metrics_line
from phalanx.telemetry.run_list import ALL_DONE, note_end, read_run
from phalanx.telemetry.run_log import RunLog, log_path
from phalanx.telemetry.run_presence import Presence, announce, page_path, presences, withdraw
from phalanx.telemetry.run_status import RunStatus, run_status

CONFIG = {"data": {"sequence_length": 64}, "train": {"steps": 100, "global_batch": 8}, "run": {"tags": ["t"]}}
MINUTE_NS = 60 * 10**9


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "one"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    figures = {"tokens_per_s": 1000.0, "step_s": 0.5, "mfu": 0.4}
    lines = [metrics_line("step", n, {"loss": 5 - n / 10, "tokens": n * 512, **figures}) for n in range(1, 11)]
    (path / "metrics.jsonl").write_bytes(b"".join(lines))
    saved = path / "checkpoints" / "step-00000008"
    saved.mkdir(parents=True)
    (path / "checkpoints" / "step-00000004").mkdir()
    (path / "checkpoints" / ".writing-step-00000012-ab").mkdir()
    os.utime(saved, (time.time() - 30,) * 2)
    return path


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.wait()


def present(run: Path, pid: int, rank: int = 0, ranks: int = 1, **changes: Any) -> Presence:
    """As if the process with this number had announced itself."""
    announce(run, rank=rank, world_size=ranks, start=3, page=page_path(run, rank))
    identity = identity_of(pid)
    assert identity is not None
    own = {"pid": pid, "started_ticks": identity.started_ticks, "page": str(run / f"{rank}.page")}
    presence = dataclasses.replace(next(p for p in presences(run) if p.rank == rank), **own | changes)
    (run / "processes" / f"rank-{rank}.json").write_text(json.dumps(dataclasses.asdict(presence)))
    return presence


def page(
    run: Path, presence: Presence, phase: str, step: int = 0, ago_ns: int = 0, expects_s: float = 0.0
) -> ProgressWriter:
    """The page of a process, written some time ago."""
    writer = ProgressWriter(presence.page, 3, clock_ns=lambda: time.monotonic_ns() - ago_ns)
    writer._numbers[0] = presence.pid
    writer.phase(phase, expects_s)
    if step:
        writer.step(step)
    return writer


def test_a_run_that_makes_steps(run: Path, process: subprocess.Popen[bytes]) -> None:
    page(run, present(run, process.pid), "step", 12)
    found = run_status(run)
    assert (found.state, found.why, found.lives) == ("running", "", True)
    assert (found.step, found.total_steps, found.loss, found.mfu) == (12, 100, 4.0, 0.4)
    assert found.left_s == pytest.approx(44.0)
    assert found.checkpoint_step == 8 and found.checkpoint_age_s == pytest.approx(30, abs=20)
    assert (found.start, found.world_size, found.tags) == (3, 1, ("t",))
    (rank,) = found.ranks
    assert (rank.life, rank.phase, rank.step, rank.pid) == ("lives", "step", 12, process.pid)
    assert json.loads(json.dumps(found.to_json()))["ranks"][0]["host"] == socket.gethostname()


@pytest.mark.parametrize(
    ("phase", "step", "ago_ns", "expects_s", "state"),
    [
        ("start", 0, 0, 300, "starting"),
        ("start", 0, 6 * MINUTE_NS, 300, "stalled"),
        ("prepare", 0, 60 * MINUTE_NS, 0, "starting"),  # text of unknown length
        ("step", 0, 9 * MINUTE_NS, 0, "starting"),  # the first step may compile
        ("step", 0, 11 * MINUTE_NS, 0, "stalled"),
        ("step", 11, MINUTE_NS // 2, 0, "running"),
        ("step", 11, 2 * MINUTE_NS, 0, "stalled"),
        ("evaluate", 11, 2 * MINUTE_NS, 0, "evaluating"),
        ("checkpoint", 11, MINUTE_NS, 30, "stalled"),
        ("end", 11, 0, 0, "ending"),
    ],
)
def test_states_by_phase(
    run: Path, process: subprocess.Popen[bytes], phase: str, step: int, ago_ns: int, expects_s: float, state: str
) -> None:
    page(run, present(run, process.pid), phase, step, ago_ns, expects_s)
    found = run_status(run)
    assert found.state == state, found.why
    assert ("py-spy" in found.why) == (state == "stalled")


@pytest.mark.parametrize(("phase", "step"), [("evaluate", 11), ("checkpoint", 11), ("start", 0), ("step", 11)])
def test_tables_and_the_dashboard_say_the_same_of_a_run(
    run: Path, process: subprocess.Popen[bytes], phase: str, step: int
) -> None:
    source = DataSource.of_folder(run.parent)
    present(run, process.pid)
    assert source.run("one").row.state == "running"
    page(run, present(run, process.pid), phase, step)
    state = run_status(run).state
    assert read_run(run).state == source.run("one").row.state == state and state in LIVING
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    found = run_status(run)
    assert (found.state, found.lives) == ("paused", True) and f"kill -CONT {process.pid}" in found.why
    row = source.run("one").row
    assert (read_run(run).state, row.state, row.why) == ("paused", "paused", found.why)
    assert source.run("one").is_live


def test_when_a_run_is_stalled_can_be_said(run: Path, process: subprocess.Popen[bytes]) -> None:
    page(run, present(run, process.pid), "step", 11, 2 * MINUTE_NS)
    assert run_status(run, stalled_after_s=600).state == "running"
    assert "no step for 2m" in run_status(run, stalled_after_s=5).why


def test_a_process_that_is_gone_and_one_whose_number_is_another(run: Path, process: subprocess.Popen[bytes]) -> None:
    present(run, process.pid, started_ticks=1)
    found = run_status(run)
    assert found.state == "died" and f"process {process.pid} is gone without a word" in found.why
    assert "goes on from its last checkpoint" in found.why and found.left_s is None
    present(run, process.pid, boot_id="another")
    assert "was started again since" in run_status(run).why


def test_a_lock_that_is_held_counts_more_than_a_process_that_cannot_be_seen(run: Path) -> None:
    """As from within another container of the host, whose processes have other numbers."""
    present(run, os.getpid(), started_ticks=1)
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_status(run).state == "running"
    assert run_status(run).state == "died"


def test_of_another_host_it_says_what_it_cannot_tell(run: Path) -> None:
    present(run, os.getpid(), host="elsewhere")
    found = run_status(run)
    assert found.state == "unknown" and "cannot tell: it was started on elsewhere" in found.why
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = run_status(run)
    assert found.state == "running" and "cannot be seen from here" in found.why


def test_ranks_that_are_behind_or_gone(run: Path, process: subprocess.Popen[bytes]) -> None:
    for rank, step, ago_ns in ((0, 12, 0), (1, 11, 0), (2, 9, 0)):
        page(run, present(run, process.pid, rank, 3), "step", step, ago_ns)
    found = run_status(run)
    assert (found.state, found.behind, len(found.ranks)) == ("running", (2,), 3)
    present(run, process.pid, 1, 3, started_ticks=1)
    found = run_status(run)
    assert found.state == "stalled" and found.why.startswith("rank 1 is gone")
    log = RunLog(log_path(run, 1, 3, "h"), 1, 3, file_bytes=1 << 20, files=2)
    log.note("started: now")
    log.note("ended: ValueError: no such thing", "ERROR")
    for rank in (0, 2):
        present(run, process.pid, rank, 3, started_ticks=1)
    assert "all 3 ranks on this host are gone" in run_status(run).why
    assert run_status(run).why.endswith("first rank 1 ended: ValueError: no such thing")


def ended(run: Path, why: str) -> RunStatus:
    note_end(run, 10, why)
    return run_status(run)


def test_how_a_run_ended(run: Path) -> None:
    assert run_status(run).state == "died"  # broke off, of a version that left no word of its process
    assert (ended(run, "stopped by SIGTERM").state, ended(run, "ValueError: x").state) == ("stopped", "failed")
    (run / "config.json").write_text(json.dumps(CONFIG | {"train": {"steps": 10}}))
    assert ended(run, ALL_DONE).state == "finished"
    (run / "metrics.jsonl").unlink()
    (run / ".lock").touch()
    (run / "environment.json").write_text("[]")
    assert ended(run, "UserError: no text").state == "failed"
    (run / "ended.json").unlink()
    assert run_status(run).state == "no step yet"
    with pytest.raises(UserError, match="not a run"):
        run_status(run / "checkpoints")


def test_who_leaves_takes_its_word_back_and_a_smaller_start_those_of_a_larger_one(tmp_path: Path) -> None:
    for rank in (1, 0):
        announce(tmp_path, rank=rank, world_size=2, start=1, page=page_path(tmp_path, rank))
    assert [p.rank for p in presences(tmp_path)] == [0, 1]
    announce(tmp_path, rank=0, world_size=1, start=2, page=None)
    (there,) = presences(tmp_path)
    assert (there.start, there.life(), there.page) == (2, "lives", "")
    (tmp_path / "processes" / "rank-0.json").write_text('{"rank": 0, "pid"')
    assert presences(tmp_path) == []
    withdraw(tmp_path, 0)
    withdraw(tmp_path, 0)
    assert not list((tmp_path / "processes").iterdir())
