"""What is the matter with a run that goes on stands on the page Run and in the list: spikes, ranks that stand still."""

from __future__ import annotations

import fcntl
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from dashboard_helpers import client_of, make_run

from phalanx.dashboard.data_source import DataSource
from phalanx.dashboard.run_troubles import RunTroubles, stands_still
from phalanx.telemetry.alerts.alert_rules import RankSeen, Seen, StepFigures
from phalanx.telemetry.loggers import metrics_line
from phalanx.telemetry.run_presence import presences

STEPS = tuple(StepFigures(step, 2.0, 1.0, 0.15) for step in range(1, 60))


class Clock:
    """Time that stands still but when it is told."""

    def __init__(self) -> None:
        self.now_s = 1.8e9

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def _going_on(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _add(run: Path, first: int, losses: list[float]) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        for step, loss in enumerate(losses, first):
            file.write(metrics_line("step", step, {"loss": loss, "grad_norm": 1.0, "step_s": 0.5}))


def test_a_loss_spike_is_shown_while_it_is_new_and_on_both_pages(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "live", steps=60, total=400)
    client = client_of(tmp_path / "runs")
    with _going_on(run):
        assert 'class="verdict' not in client.get("/run/troubles?run=live").text
        assert 'class="badge' not in client.get("/runs/table").text
    _add(run, 61, [9.0, 9.0, 9.0])
    source, clock = DataSource.of_folder(tmp_path / "runs"), Clock()
    troubles = RunTroubles(clock)
    with _going_on(run):
        (spike,) = troubles.of(source.run("live"))
        assert (spike.kind, spike.look) == ("loss_spike", "warn")
        assert spike.title.startswith("the loss is 9 at step 61, usually")
        text = client_of(tmp_path / "runs").get("/run?run=live").text
        assert 'class="verdict warn"' in text and "the loss is 9 at step 61" in text
        assert "▲ loss spike</span>" in client_of(tmp_path / "runs").get("/").text
        _add(run, 64, [2.3] * 40)
        clock.now_s += 5
        assert [one.kind for one in troubles.of(source.run("live"))] == ["loss_spike"]  # long enough to be seen
        clock.now_s += 60
        assert troubles.of(source.run("live")) == []
    assert troubles.of(source.run("live")) == []


def test_a_loss_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "live", steps=10, total=400)
    _add(run, 11, [math.nan])
    with _going_on(run):
        (found,) = RunTroubles().of(DataSource.of_folder(tmp_path).run("live"))
    assert (found.kind, found.look) == ("not_finite", "bad")


_RANK = """
import sys, time
from pathlib import Path
from phalanx.core.progress import ProgressWriter
from phalanx.telemetry.run_presence import announce

run, page = Path(sys.argv[1]), Path(sys.argv[2])
progress = ProgressWriter(page)
progress.phase("step")
announce(run, rank=0, world_size=1, start=1, page=page)
step = 60
while True:
    step += 1
    progress.step(step)
    time.sleep(0.01)
"""


def test_a_rank_whose_process_is_stopped_is_named_and_forgotten_when_it_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "live", steps=60, total=400)
    rank = subprocess.Popen([sys.executable, "-c", _RANK, str(run), str(tmp_path / "0.page")])
    try:
        _until(lambda: bool(presences(run)))
        troubles, source = RunTroubles(), DataSource.of_folder(tmp_path / "runs")
        with _going_on(run):
            assert troubles.of(source.run("live")) == []
            rank.send_signal(signal.SIGSTOP)
            _until(lambda: any("rank 0 is stopped" in one.title for one in troubles.of(source.run("live"))))
            (stopped,) = troubles.of(source.run("live"))
            assert (stopped.kind, stopped.look, stopped.words) == ("stall", "bad", "stands still")
            rank.send_signal(signal.SIGCONT)
            _until(lambda: troubles.of(source.run("live")) == [])
    finally:
        rank.kill()
        rank.wait()


def _until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < until_s, "it does not come"
        time.sleep(0.02)


def _seen(**more: object) -> Seen:
    values: dict[str, object] = {"steps": STEPS, "step": 59, "steps_here": 59, "phase": "step", "quiet_s": 0.1}
    return Seen(**values | more)  # type: ignore[arg-type]


def test_what_counts_as_standing_still() -> None:
    assert stands_still(_seen()).state == "clear"
    assert stands_still(_seen(quiet_s=1.7)).state == "clear"
    still = stands_still(_seen(quiet_s=2.0))
    assert (still.state, still.title) == ("firing", "no step for 2.0s after step 59; usually one takes 150ms")
    assert stands_still(_seen(quiet_s=20.0, phase="evaluation")).state == "clear"
    assert stands_still(_seen(quiet_s=20.0, steps_here=1)).state == "clear"  # the first steps compile


@pytest.mark.parametrize(("state", "what"), [("T", "stopped"), ("", "gone")])
def test_a_rank_that_is_out_is_named(state: str, what: str) -> None:
    ranks = [RankSeen(0, 11, "S", 0.0, 59, "step"), RankSeen(1, 12, state, 0.6, 59, "step")]
    verdict = stands_still(_seen(ranks=ranks))
    assert verdict.title == f"no progress after step 59: rank 1 is {what}"
    ranks[1] = RankSeen(1, 12, state, 0.1, 59, "step")
    assert stands_still(_seen(ranks=ranks)).state == "clear"  # a moment is nothing
    ranks[1] = RankSeen(1, 12, state, 9.0, 59, "end")
    assert stands_still(_seen(ranks=ranks)).state == "clear"
