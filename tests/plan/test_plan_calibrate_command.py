"""`phalanx plan calibrate` as a person calls it: it measures in other processes, and leaves files and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.checks.calibration.calibration_messages import Answer, Task, together
from phalanx.cli import calibration
from phalanx.cli.main import group
from phalanx.core.errors import UserError
from phalanx.plan.calibrate import measure
from phalanx.plan.calibrate.measure import MeasurementPlan, RankPlacement
from phalanx.plan.hardware.cluster import load_cluster


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that a test has measure; those of other tests in this process are none of its business."""
    found: list[subprocess.Popen[bytes]] = []
    begin = measure._start

    def start(*given: object) -> subprocess.Popen[bytes]:
        found.append(begin(*given))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(measure, "_start", start)
    return found


@pytest.mark.slow
def test_this_machine_is_measured_and_a_run_on_it_predicted(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    path = tmp_path / "this.toml"
    done = CliRunner().invoke(group, ["plan", "calibrate", "--quick", "--ranks", "2", "-o", str(path), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["files"] == [str(tmp_path / name) for name in
                             ("this.2.device.toml", "this.links.toml", "this.toml")]  # fmt: skip
    assert told["measured"][0]["values"]["products, fp32"]["value"] > 1e8
    cluster = load_cluster(path)
    assert 1e-6 < cluster.collective_s("all_reduce", 1 << 20, 2) < 10
    assert 1e-6 < cluster.device.gemm_s(256, 256, 256, "fp32") < 10
    assert started
    assert all(process.returncode is not None for process in started)


@pytest.mark.slow
def test_a_process_that_dies_is_named_and_the_others_end(started: list[subprocess.Popen[bytes]]) -> None:
    places = [RankPlacement((), 1), RankPlacement((), 1)]
    kill = threading.Timer(0.5, lambda: os.kill(started[0].pid, signal.SIGKILL))
    kill.start()
    with pytest.raises(UserError, match="status -9"):
        measure.measure(places, MeasurementPlan(quick=True))
    kill.join()
    assert [process.poll() for process in started] == [-9, -9]


def test_the_time_limit_ends_all(started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(UserError, match=r"more than 0\.1 s"):
        measure.measure([RankPlacement((), 1)], MeasurementPlan(quick=True, limit_s=0.1))
    assert [process.returncode for process in started] == [-9]


def test_help_and_the_planner_know_nothing_of_torch() -> None:
    modules = "phalanx.cli.calibration, phalanx.cli.plan_command, phalanx.plan.calibrate.calibration_files"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-o", "here.json"], "end it in .toml"),
        (["-o", "/nowhere/here.toml"], "cannot be written"),
        (["--device", "cuda"], "no GPU is visible"),
    ],
)
def test_nonsense_is_refused_before_minutes_are_lost(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(calibration, "measure", lambda *_: pytest.fail("it measures"))
    done = CliRunner().invoke(group, ["plan", "calibrate", *arguments])
    assert isinstance(done.exception, UserError)
    assert told in str(done.exception)


def test_processes_are_placed_as_training_places_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = frozenset(range(4))
    monkeypatch.setattr(calibration, "allowed_cpus", lambda: cpus)
    monkeypatch.setattr("phalanx.launch.cores.allowed_cpus", lambda: cpus)
    monkeypatch.setattr(calibration, "read_cores", lambda allowed: list(allowed))
    monkeypatch.setattr("phalanx.launch.cores.read_cores", lambda allowed: _cores(4))
    assert calibration.counts_of((), 0) == [1, 4]
    assert calibration.counts_of((4, 2, 2), 0) == [2, 4]
    assert calibration.counts_of((), 8) == [8]
    assert calibration.places_of(1, on_gpus=False) == [RankPlacement((), 4)]
    assert calibration.places_of(2, on_gpus=False) == [RankPlacement((0, 1), 2), RankPlacement((2, 3), 2)]
    with pytest.raises(UserError, match="this host has 8 GPUs"):
        calibration.counts_of((16,), 8)


def _cores(count: int) -> list[object]:
    from phalanx.launch.cores import Core

    return [Core(0, 0, number, (number,)) for number in range(count)]


def test_a_task_and_an_answer_survive_their_way() -> None:
    task = Task("store", 1, 2, 4, (0, 1), "cpu", ("fp32",), True, 7, 0.5)
    assert Task.from_json(task.to_json()) == task
    import plan_calibrate_samples as samples

    answer = samples.answer(2)
    assert Answer.from_json(answer.to_json()) == answer
    both = together([answer, samples.answer(2, slower=3.0)])
    assert both.timings[0].seconds == pytest.approx(2 * answer.timings[0].seconds)
    with pytest.raises(ValueError, match="no answer"):
        Answer.from_json("[]")
