"""Real trainings that are watched from outside: each kind of trouble is reported once, by who outlives them."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from train_helpers import Commands, configured, entries, overrides, run_all, until

from phalanx.core.errors import UserError
from phalanx.telemetry.run_list import read_run
from phalanx.telemetry.run_presence import presences
from phalanx.telemetry.run_status import run_status
from phalanx.train.training_run import Run

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

WATCHED: dict[str, Any] = {"alerts.watch": True, "alerts.disk_free_bytes": 0, "checkpoint.every_steps": 50}
ENDLESS = WATCHED | {"train.steps": 100_000}


def alerts(run: Path, event: str = "alert") -> list[dict[str, Any]]:
    with suppress(FileNotFoundError):
        lines = [json.loads(line) for line in (run / "alerts" / "alerts.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == event]
    return []


def kinds(run: Path) -> list[str]:
    return [alert["kind"] for alert in alerts(run)]


def await_alert(run: Path, kind: str, count: int = 1) -> dict[str, Any]:
    """The newest alert of a kind, when there are so many."""
    return until(lambda: found[-1] if len(found := [a for a in alerts(run) if a["kind"] == kind]) >= count else None)


def steps_of(run: Path) -> int:
    with suppress(FileNotFoundError):
        return len(entries(run))
    return 0


@contextmanager
def training(commands: Commands, folder: Path, changes: dict[str, Any]) -> Iterator[Any]:
    """A `phalanx train` in a process of its own, that has made some steps; it is killed at last."""
    (folder / "empty.toml").touch()
    process = commands.start(folder, ["train", str(folder / "empty.toml"), *overrides(folder, changes)])
    try:
        until(lambda: steps_of(folder / "run") >= 5 or not process.is_alive())
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join(60)


def watchers(run: Path) -> list[int]:
    """Processes that watch this run."""
    found = []
    for each in Path("/proc").iterdir():
        with suppress(OSError):
            is_watcher = each.name.isdigit() and "run_watcher" in (each / "cmdline").read_text()
            if is_watcher and str(run / "alerts" / "watcher.log") == str((each / "fd" / "1").readlink()):
                found.append(int(each.name))
    return found


def test_a_rank_that_is_killed_and_a_run_that_goes_on_to_its_end(commands: Commands, tmp_path: Path) -> None:
    """The failure is reported by the watcher, which ends then; the resumed run reports its own end."""
    run = tmp_path / "run"
    kept = tmp_path / "kept"
    to = {"alerts.command": ["tee", "-a", str(kept)]}
    with training(commands, tmp_path, ENDLESS | to) as process:
        assert len(watchers(run)) == 1
        until(lambda: entries(run, "checkpoint"))
        os.kill(process.pid, signal.SIGKILL)
        found = await_alert(run, "failed")
        assert "gone without a word" in found["title"]
        assert str(process.pid) in found["title"]
    until(lambda: not watchers(run))
    to_its_end = WATCHED | to | {"train.steps": steps_of(run) + 20, "run.resume": "changed"}
    resumed = commands.run(tmp_path, "train", str(tmp_path / "empty.toml"), *overrides(tmp_path, to_its_end))
    assert resumed.status == 0, resumed.err
    found = await_alert(run, "finished")
    assert found["severity"] == "info"
    until(lambda: not watchers(run))
    assert kinds(run) == ["failed", "finished"]
    assert [json.loads(line)["kind"] for line in kept.read_text().splitlines()] == ["failed", "finished"]
    assert len(alerts(run, "delivered")) == 2


def test_a_process_that_is_stopped(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "run" / "telemetry").mkdir(parents=True)  # as where spans are recorded
    with training(commands, tmp_path, ENDLESS) as process:
        os.kill(process.pid, signal.SIGSTOP)
        found = await_alert(tmp_path / "run", "stall")
        assert found["evidence"]["who"] == [f"rank 0 (process {process.pid}) is stopped"]
        before = steps_of(tmp_path / "run")
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: steps_of(tmp_path / "run") > before)
    await_alert(tmp_path / "run", "failed")
    assert kinds(tmp_path / "run") == ["stall", "failed"]
    incidents = (tmp_path / "run" / "telemetry" / "incidents.jsonl").read_text().splitlines()
    assert "stall" in [json.loads(line)["kind"] for line in incidents]


def test_a_run_that_is_asked_to_stop(commands: Commands, tmp_path: Path) -> None:
    with training(commands, tmp_path, ENDLESS) as process:
        os.kill(process.pid, signal.SIGTERM)
        found = await_alert(tmp_path / "run", "stopped")
    assert "by SIGTERM" in found["title"]
    assert kinds(tmp_path / "run") == ["stopped"]


def _train_with(folder: str, changes: dict[str, Any], fault: Callable[[Run, int, Any], Any]) -> None:
    """A training in which `fault` sees the loss of every step; for a process of its own."""
    original = Run.accumulate_gradients

    @functools.wraps(original)
    def faulty(run: Run, batch: Any) -> Any:
        return fault(run, run.progress.step + 1, original(run, batch))

    Run.accumulate_gradients = faulty  # type: ignore[method-assign]
    run_all(Path(folder), changes)


def _nan_at_40(run: Run, step: int, loss: Any) -> Any:
    return loss * math.nan if step == 40 else loss


def _spikes_from_100(run: Run, step: int, loss: Any) -> Any:
    return loss + 30.0 if 100 <= step < 108 else loss


def _slow_from_60(run: Run, step: int, loss: Any) -> Any:
    time.sleep(1.0 if step >= 60 else 0.01)
    return loss


@pytest.mark.campaign(but=("_spikes_from_100-changes1-loss_spike-usually",))
@pytest.mark.parametrize(
    ("fault", "changes", "kind", "said"),
    [
        (_nan_at_40, {"train.steps": 80}, "not_finite", "the loss is nan at step 40"),
        (_spikes_from_100, {"train.steps": 150}, "loss_spike", "usually"),
        (_slow_from_60, {"train.steps": 68, "alerts.throughput_for_s": 2.5}, "throughput", "below the usual"),
    ],
)
def test_figures_that_go_wrong(
    commands: Commands, tmp_path: Path, fault: Any, changes: dict[str, Any], kind: str, said: str
) -> None:
    assert commands.call(_train_with, str(tmp_path), WATCHED | changes, fault) == 0
    await_alert(tmp_path / "run", "finished")
    found = [alert for alert in alerts(tmp_path / "run") if alert["kind"] == kind]
    assert len(found) == 1
    assert said in found[0]["title"]
    assert set(kinds(tmp_path / "run")) - {kind} == {"finished"}


def test_a_failure_with_its_cause(commands: Commands, tmp_path: Path) -> None:
    """Too many bad steps in a row end the run by its own word."""
    changes = WATCHED | {"optim.lr": 1e30, "optim.clip_norm": 0.0, "optim.bad_step.max_in_a_row": 5}
    assert commands.call(_train_with, str(tmp_path), changes, _all_nan) != 0
    found = await_alert(tmp_path / "run", "failed")
    assert "bad" in found["title"]
    assert kinds(tmp_path / "run") == ["not_finite", "failed"]


def _all_nan(run: Run, step: int, loss: Any) -> Any:
    return loss * math.nan


def test_a_disk_that_fills_up(commands: Commands, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk of its own cannot be mounted here")
    try:
        run = disk / "run"
        changes = ENDLESS | {"run.folder": str(run), "alerts.disk_free_bytes": 16 << 20, "checkpoint.keep_last": 1}
        (tmp_path / "empty.toml").touch()
        process = commands.start(tmp_path, ["train", str(tmp_path / "empty.toml"), *overrides(tmp_path, changes)])
        try:
            until(lambda: steps_of(run) >= 5)
            assert kinds(run) == []
            (disk / "filler").write_bytes(bytes(32 << 20))
            found = await_alert(run, "disk")
            assert found["evidence"]["total_bytes"] == 48 << 20
            assert found["evidence"]["free_bytes"] < 16 << 20
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.join(60)
        await_alert(run, "failed")
        until(lambda: not watchers(run))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_one_of_two_ranks_is_killed(commands: Commands, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(commands, tmp_path, ENDLESS | {"parallel.devices": 2, "checkpoint.mode": "blocking"}) as process:
        killed = until(lambda: presences(run, [1]))[0]
        os.kill(killed.pid, signal.SIGKILL)
        found = await_alert(run, "failed")
        process.join(60)
    why = f"rank 1 (process {killed.pid}) was killed by SIGKILL"
    assert found["evidence"]["who"] == [why] and why in found["title"]
    assert kinds(run) == ["failed"]
    row, status = read_run(run), run_status(run)
    assert (row.state, row.why) == (status.state, status.why) and status.state == "died" and why in status.why
    assert [rank.rank for rank in status.ranks] == [1]
    assert "ended: killed by SIGKILL" in next((run / "logs").glob("rank-1.*")).read_text()


def test_what_rank_0_refuses_is_one_line_and_no_traceback_of_its_peers(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").touch()
    two = {"parallel.devices": 2, "train.steps": 4}
    assert commands.run(tmp_path, "train", "empty.toml", *overrides(tmp_path, two)).status == 0
    shorter = commands.run(tmp_path, "train", "empty.toml", *overrides(tmp_path, two | {"train.steps": 2}))
    assert shorter.status == 2
    assert len(shorter.err.splitlines()) == 1, shorter.err
    assert shorter.err.startswith("error: run.folder = ") and "train.steps: 4 -> 2" in shorter.err


def test_metrics_of_a_plain_run(commands: Commands, tmp_path: Path) -> None:
    """They are read from the watcher, so they come also while the training stands still."""
    with training(commands, tmp_path, ENDLESS | {"logging.metrics_address": "127.0.0.1:0"}) as process:
        note = until(lambda: next((w for w in (tmp_path / "out").read_text().split() if w.endswith("/metrics")), ""))
        os.kill(process.pid, signal.SIGSTOP)

        def read() -> dict[str, float]:
            text = urllib.request.urlopen(note, timeout=30).read().decode()
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

        found = until(lambda: values if (values := read()).get("phalanx_train_steps_total", 0) >= 5 else None)
        assert found["phalanx_train_step"] >= 5
        assert 0 < found["phalanx_train_loss"] < 20
        assert found["phalanx_train_tokens_per_second"] > 0
        assert found["phalanx_train_planned_steps"] == 100_000
        assert found["phalanx_train_restarts_total"] == 0
        assert found['phalanx_train_alerts_total{kind="failed"}'] == 0
        assert abs(time.time() - found["phalanx_train_last_checkpoint_timestamp_seconds"]) < 600


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logging.metrics_address": "nowhere"}, "write HOST:PORT"),
        ({"logging.metrics_address": "192.0.2.1:1"}, "cannot be listened at"),
        ({"alerts.urls": ["env:NO_SUCH_VARIABLE"]}, "NO_SUCH_VARIABLE is not set"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        run_all(tmp_path, changes)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_run_that_asks_for_nothing_is_not_watched(tmp_path: Path) -> None:
    assert not configured(tmp_path).alerts.is_on
    run_all(tmp_path, {"train.steps": 2})
    assert not (tmp_path / "run" / "alerts").exists()
