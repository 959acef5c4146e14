"""`phalanx status` and `phalanx logs`, of runs that train in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import status_page
from click.testing import CliRunner, Result
from train_helpers import Commands, overrides

from phalanx.cli.main import group
from phalanx.core.errors import UserError
from phalanx.telemetry.run_presence import presences
from phalanx.telemetry.run_status import run_status

GUARD_S = 300.0
ENDLESS = {"train.steps": 1_000_000, "checkpoint.every_steps": 1_000_000, "logging.every_steps": 5}


def test_the_page_shows_what_its_commands_print() -> None:
    assert status_page.page_now() == status_page.PAGE.read_text(), "write it again: python benchmarks/status_page.py"


Start = Callable[..., BaseProcess]


def phalanx(*arguments: str | Path) -> Result:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(group, [*map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def until(fact: Callable[[], bool]) -> None:
    until_s = time.monotonic() + GUARD_S
    while not fact():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def makes_steps(run: Path) -> None:
    def did() -> bool:
        try:
            found = run_status(run)
        except UserError:
            return False
        return found.state == "running" and (found.step or 0) >= 10 and found.loss is not None

    until(did)


@pytest.fixture
def start(tmp_path: Path, commands: Commands) -> Iterator[Start]:
    """Starts `phalanx train` in a process of its own."""
    children: list[BaseProcess] = []
    (tmp_path / "tiny.toml").touch()

    def begin(**changes: object) -> BaseProcess:
        settings = ENDLESS | {name.replace("__", "."): value for name, value in changes.items()}
        children.append(commands.start(tmp_path, ["train", "tiny.toml", *overrides(tmp_path, settings)]))
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.join()


@pytest.mark.slow
def test_a_run_is_watched_from_other_processes_paused_killed_and_started_again(
    tmp_path: Path, start: Start, commands: Commands
) -> None:
    run, child = tmp_path / "run", start()
    makes_steps(run)
    told = phalanx("status", run)
    assert told.exit_code == 0 and "running" in told.output and f"pid {child.pid}" in told.output
    assert re.search(r"step \d+/1000000, 0\.0%, left ", told.output)
    assert json.loads(phalanx("status", run, "--json").output)["ranks"][0]["pid"] == child.pid
    assert phalanx("status", tmp_path).output.startswith("run  running")  # the only one there

    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: run_status(run).state == "paused")
    assert phalanx("status", run).exit_code == 4
    os.kill(child.pid, signal.SIGCONT)
    makes_steps(run)

    child.kill()
    child.join()
    told = phalanx("status", run)
    assert told.exit_code == 3 and f"process {child.pid} is gone without a word" in told.output

    again = start()
    until(lambda: bool(presences(run)) and presences(run)[0].pid == again.pid)
    makes_steps(run)
    for name in ("watching", "following"):
        (tmp_path / name).mkdir()
    watching = commands.start(tmp_path / "watching", ["status", str(run), "--watch", "--every", "0.1"])
    following = commands.start(tmp_path / "following", ["logs", str(run), "-f", "-n", "1"])
    until(lambda: "running" in shown(tmp_path / "watching") and "loss" in shown(tmp_path / "following"))
    again.terminate()
    for process, status in ((again, 128 + signal.SIGTERM), (watching, 5), (following, 0)):
        process.join(GUARD_S)
        assert process.exitcode == status
    assert "stopped by SIGTERM" in shown(tmp_path / "watching")
    assert shown(tmp_path / "following").rstrip().endswith("ended: stopped by SIGTERM")
    told = phalanx("status", run)
    assert told.exit_code == 5 and "stopped by SIGTERM" in told.output and not presences(run)

    starts = [line.text for line in _lines(run, "--grep", "started:")]
    assert len(starts) == 2 and f"pid {child.pid}" in starts[0] and f"pid {again.pid}" in starts[1]
    assert [line.text for line in _lines(run, "--grep", "^ended:")] == ["ended: stopped by SIGTERM"]


def shown(folder: Path) -> str:
    """What a command has printed so far."""
    return "".join((folder / name).read_text() for name in ("out", "err") if (folder / name).exists())


class _Line:
    def __init__(self, text: str) -> None:
        self.__dict__ = json.loads(text)

    text: str
    level: str
    rank: int


def _lines(run: Path, *words: str) -> list[_Line]:
    return [_Line(line) for line in phalanx("logs", run, "--json", *words).output.splitlines()]


@pytest.mark.slow
def test_ranks_each_have_a_log_and_what_one_raised_is_told(tmp_path: Path, start: Start) -> None:
    run, child = tmp_path / "run", start(parallel__replicate=2)
    makes_steps(run)
    ranks = presences(run)
    assert [(rank.rank, rank.world_size, rank.life()) for rank in ranks] == [(0, 2, "lives"), (1, 2, "lives")]
    told = phalanx("status", run, "--ranks").output
    assert "2 ranks" in told and all(str(rank.pid) in told for rank in ranks)
    assert {line.rank for line in _lines(run, "--grep", "started")} == {0, 1}
    assert {line.rank for line in _lines(run, "--rank", "1")} == {1}
    os.kill(ranks[1].pid, signal.SIGKILL)
    child.join(GUARD_S)
    found = run_status(run)
    assert found.state == "died" and "rank 1 " in found.why and "SIGKILL" in found.why, found


def test_an_error_is_in_the_log_with_its_traceback_and_status_says_which(tmp_path: Path, start: Start) -> None:
    child = start(optim__lr=1e30, train__steps=50)
    child.join(GUARD_S)
    assert "max_in_a_row" in shown(tmp_path) and child.exitcode == 2
    told = phalanx("status", tmp_path / "run")
    assert told.exit_code == 1 and "failed" in told.output and "max_in_a_row" in told.output
    lines = _lines(tmp_path / "run", "--level", "error")
    assert lines[-1].text.startswith("ended: optim.bad_step.max_in_a_row")


def test_a_finished_run_bad_words_and_several_runs(tmp_path: Path, trained: Path) -> None:
    told = phalanx("status", trained / "run")
    assert told.exit_code == 0 and "finished" in told.output
    assert "done:" in phalanx("logs", trained / "run", "-n", "5").output
    assert phalanx("logs", trained / "run", "--since", "0.001s").output == ""
    for words, cure in (
        (["status", tmp_path / "absent"], "there is no such folder"),
        (["logs", tmp_path], "no run lies there"),
        (["status", "http://127.0.0.1:9"], "--driver-token"),
    ):
        with pytest.raises(UserError, match=cure):
            phalanx(*words)
    assert "is not a time" in phalanx("logs", trained / "run", "--since", "soon").output
    assert "regular expression" in phalanx("logs", trained / "run", "--grep", "(").output
    assert phalanx("status", tmp_path).output == f"no run in {tmp_path}\n"
    for name, age_s in (("a", 3600), ("b", 7200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
        os.utime(tmp_path / name / "metrics.jsonl", (time.time() - age_s,) * 2)
    assert [line.split()[0] for line in phalanx("status", tmp_path).output.splitlines()] == ["run", "a", "b"]
    assert len(json.loads(phalanx("status", tmp_path, "--json").output)["runs"]) == 2
    with pytest.raises(UserError, match="has no log files"):
        phalanx("logs", tmp_path / "a")
    (tmp_path / "own" / "telemetry" / "steps").mkdir(parents=True)
    with pytest.raises(UserError, match=r"a loop of its own, .* phalanx trace summary"):
        phalanx("logs", tmp_path / "own")
    (tmp_path / "a" / "run.json").write_text('{"imported": "csv: x.csv"}')
    with pytest.raises(UserError, match="was imported"):
        phalanx("logs", tmp_path / "a")
