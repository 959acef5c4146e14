"""`phalanx run` as people use it: from terminals that are closed, twice in a row, and from elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
from click.testing import CliRunner

from phalanx.cli.main import group
from phalanx.core.errors import UserError

GUARD_S = 180.0

SCRIPT = """
import os, signal, sys, time
rank = os.environ["RANK"]
def save(*_):
    open(f"saved-{rank}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("hello from", rank, flush=True)
until_s = time.monotonic() + 300
while not os.path.exists("enough") and time.monotonic() < until_s:
    time.sleep(0.05)
print("bye from", rank, flush=True)
"""


class Said(NamedTuple):
    """What a command said."""

    returncode: int
    stdout: str
    stderr: str


@dataclass
class Place:
    """A folder in which people work."""

    path: Path

    @property
    def run(self) -> Path:
        return self.path / "runs" / "wait"

    def card(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.run / "job.json").read_text())
        return {}

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "phalanx.cli.main", "run", *words]

    def call(self, *words: str) -> Said:
        """Give a command in this process, which is quicker than starting another."""
        with contextlib.chdir(self.path):
            result = CliRunner().invoke(group, ["run", *words])
        if isinstance(result.exception, UserError):
            return Said(2, result.stdout, result.stderr + str(result.exception))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Said(result.exit_code, result.stdout, result.stderr)

    def begin(self, *words: str) -> subprocess.Popen[bytes]:
        """In a session of its own, as a shell's job is in a group of its own."""
        with (self.path / "said").open("wb") as said:
            return subprocess.Popen(
                self.words(*words, "--", "wait.py"), cwd=self.path, stdout=said, stderr=said, start_new_session=True
            )

    def until(self, condition: Callable[[], Any]) -> Any:
        until_s = time.monotonic() + GUARD_S
        while not (found := condition()):
            assert time.monotonic() < until_s, self.said()
            time.sleep(0.05)
        return found

    def said(self) -> str:
        files = [self.path / "said", self.run / "driver.log"]
        return "\n".join(file.read_text(errors="replace") for file in files if file.exists())

    def lines(self) -> list[str]:
        """Of ranks, as they stand in their logs."""
        return [line for path in self.run.glob("logs/rank-*/*.log") for line in path.read_text().splitlines()]

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.cwd() == str(self.path) and process.pid != os.getpid():
                    found.append(process)
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "wait.py").write_text(SCRIPT)
    place = Place(tmp_path)
    yield place
    for process in place.processes():
        with contextlib.suppress(psutil.Error):
            process.kill()


def in_terminal(place: Place, *words: str) -> None:
    """Give a command in a terminal of its own, and close the terminal when the command has returned."""
    pid, terminal = pty.fork()
    if pid == 0:  # a shell, which leads the terminal's session
        os.chdir(place.path)
        quoted = " ".join(f"'{word}'" for word in place.words(*words))
        os.execv("/bin/sh", ["sh", "-c", f"{quoted}; echo status $?; exec sleep 600"])
    said = b""
    with contextlib.suppress(OSError):
        while b"status " not in said:
            said += os.read(terminal, 4096)
    os.close(terminal)  # the kernel sends SIGHUP
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGHUP
    (place.path / "terminal").write_bytes(said)
    assert b"status 0" in said, said.decode()


def kill_driver(place: Place, *, alone: bool = False) -> None:
    """And who would start it again, unless it `alone` dies."""
    names = [] if alone else ["supervisor.json"]
    for pid in [*(json.loads((place.run / name).read_text())["pid"] for name in names), place.card()["pid"]]:
        os.kill(pid, signal.SIGKILL)
    driver = place.card()["pid"]
    place.until(lambda: not psutil.pid_exists(driver) or psutil.Process(driver).status() == psutil.STATUS_ZOMBIE)


def in_place(place: Place, *words: str) -> Said:
    """Give one of the commands for runs, which take a job too."""
    with contextlib.chdir(place.path):
        result = CliRunner(env={"COLUMNS": "200"}).invoke(group, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Said(result.exit_code, result.stdout, result.stderr)


def check_commands_for_runs(place: Place) -> None:
    """Of a job of two ranks, by its folder and its URL, also from another folder."""
    url, token = place.card()["http"], str(place.run / "secret" / "token")
    (place.path / "else").mkdir()
    for words in (["runs/wait"], [], [url]):
        told = in_place(place, "status", *words)
        assert told.returncode == 0 and "host-1" in told.stdout, told
    with contextlib.chdir(place.path / "else"):
        told = CliRunner().invoke(group, ["status", url, "--driver-token", token, "--json"])
        assert json.loads(told.stdout)["world_size"] == 2
        lines = CliRunner().invoke(group, ["logs", url, "--driver-token", token, "--grep", "hello", "--rank", "1"])
        assert lines.stdout.rstrip().endswith("[rank 1] hello from 1") and lines.stdout.count("hello") == 1
    assert in_place(place, "logs", "runs/wait", "--grep", "hello").stdout.count("hello") == 2
    assert in_place(place, "logs", "runs/wait", "--since", "0.001s").stdout == ""


def check_token(place: Place) -> None:
    """It is in no environment, command line or output."""
    token = (place.run / "secret" / "token").read_text().strip()
    for process in place.processes():
        with contextlib.suppress(psutil.Error, OSError):
            assert token not in " ".join(process.cmdline())
            assert token not in Path(f"/proc/{process.pid}/environ").read_text(errors="replace")
    for path in [path for path in place.path.rglob("*") if path.is_file() and path.parent.name != "secret"]:
        assert token.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_a_detached_job_outlives_its_terminal_and_its_drivers_and_can_be_given_again(place: Place) -> None:
    in_terminal(place, "--detach", "--workers-per-host", "2", "--", "wait.py")
    assert "phalanx run attach" in (place.path / "terminal").read_text()
    place.until(lambda: sum("hello" in line for line in place.lines()) == 2)

    check_commands_for_runs(place)
    assert len(place.processes()) >= 3
    check_token(place)

    first = place.card()["pid"]
    os.kill(first, signal.SIGKILL)
    place.until(lambda: place.card()["pid"] != first)
    assert "was killed by SIGKILL" in place.said()
    place.until(lambda: place.call("status").returncode == 0)

    shown = place.call("status", "--json")
    assert json.loads(shown.stdout)["world_size"] == 2
    assert place.card()["http"] == f"http://{(place.run / 'http').read_text().strip()}"
    refused = place.call("--", "wait.py")
    assert refused.returncode == 2 and "runs there already" in refused.stderr and "attach" in refused.stderr

    kill_driver(place)
    dead = place.call("status")
    assert dead.returncode == 3
    assert "is dead" in dead.stdout and "1 of its hosts live" in dead.stdout and "takes over" in dead.stdout
    ordered = place.call("drain", "host-1")
    assert ordered.returncode == 2 and "is dead" in ordered.stderr
    next_one = place.call("-d", "--workers-per-host", "2", "--", "wait.py")
    assert next_one.returncode == 0 and "this one takes over" in next_one.stderr
    place.until(lambda: place.call("status").returncode == 0)
    unknown = place.call("evict", "nobody")
    assert unknown.returncode == 2 and "no host 'nobody'" in unknown.stderr
    watching = subprocess.Popen(place.words("attach"), cwd=place.path, stderr=subprocess.PIPE, text=True)

    follow = [*place.words()[:-1], "logs", "-f"]
    following = subprocess.Popen(follow, cwd=place.path, stdout=subprocess.PIPE, text=True)
    assert following.stdout is not None and "hello" in following.stdout.readline()

    (place.path / "enough").touch()
    assert "bye" in following.communicate(timeout=GUARD_S)[0] and following.returncode == 0
    assert "status 0" in watching.communicate(timeout=GUARD_S)[1]
    assert watching.returncode == 0
    assert place.until(lambda: place.card()["status"] is not None) is True and place.card()["status"] == 0
    assert sum("hello" in line for line in place.lines()) == 2  # no rank was started again
    over = place.call("status")
    assert over.returncode == 0 and "ended with status 0" in over.stdout
    assert place.call("logs", "-n", "1", "1").stdout.strip().endswith("bye from 1")
    late = place.call("stop")
    assert late.returncode == 2 and "is over" in late.stderr
    assert psutil.wait_procs(place.processes(), GUARD_S)[1] == []
    check_token(place)
    for name in ("plain", "other"):
        (place.path / "runs" / name).mkdir()
        (place.path / "runs" / name / "metrics.jsonl").touch()
    assert "job wait: ended with status 0: phalanx status runs/wait" in in_place(place, "status").stdout

    (place.path / "enough").unlink()
    again = place.call("-d", "--", "wait.py")
    assert again.returncode == 0 and "earlier/0001" in again.stderr
    place.until(lambda: sum("hello" in line for line in place.lines()) == 1)
    assert (place.run / "executors" / "host-1.json").exists()  # hosts are counted anew
    assert place.call("status", "--folder", "runs/wait/earlier/0001").stdout.startswith("wait  ended with status 0")
    stopped = place.call("stop", "--wait")
    assert stopped.returncode == 0 and "ended with status 5" in stopped.stdout
    assert (place.path / "saved-0").exists()
    assert psutil.wait_procs(place.processes(), GUARD_S)[1] == []


@pytest.mark.campaign(but=("2",))
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_in_the_foreground_a_signal_stops_the_job_once_and_in_order(place: Place, number: signal.Signals) -> None:
    command = place.begin()
    place.until(lambda: any("hello" in line for line in place.lines()))
    os.killpg(command.pid, number)  # as a terminal does
    assert command.wait(GUARD_S) == 5, place.said()
    assert (place.path / "saved-0").exists()
    journal = place.call("status", "--json")
    assert json.loads(journal.stdout)["status"] == 5
    assert psutil.wait_procs(place.processes(), GUARD_S)[1] == []


@pytest.mark.campaign
@pytest.mark.slow
def test_a_terminal_that_is_closed_stops_what_runs_in_its_foreground(place: Place) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(place.path)
        words = place.words("--", "wait.py")
        os.execv(words[0], words)
    place.until(lambda: any("hello" in line for line in place.lines()))
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 5
    assert place.card()["status"] == 5 and (place.path / "saved-0").exists()
    assert psutil.wait_procs(place.processes(), GUARD_S)[1] == []


@pytest.mark.campaign
@pytest.mark.slow
def test_a_job_whose_driver_is_dead_can_be_stopped_and_has_ended_then(place: Place) -> None:
    place.begin("--hosts", "2", "--detach").wait(GUARD_S)
    place.until(lambda: sum("hello" in line for line in place.lines()) >= 1 and len(place.processes()) >= 8)
    place.until(lambda: len(list(place.run.glob("logs/rank-*"))) == 2)
    time_s = time.monotonic()
    place.until(lambda: sum("hello" in line for line in place.lines()) == 2 or time.monotonic() - time_s > 20)
    kill_driver(place)
    stopped = place.call("stop")
    assert stopped.returncode == 0 and "2 hosts" in stopped.stdout, stopped
    assert (place.path / "saved-0").exists() and (place.path / "saved-1").exists()  # they had time to save
    assert psutil.wait_procs(place.processes(), GUARD_S)[1] == []
    assert place.card()["status"] == 5 and "while its driver was dead" in place.card()["ended"]
    after = place.call("status")
    assert after.returncode == 0 and "ended with status 5" in after.stdout, after
    again = place.call("stop")
    assert again.returncode == 2 and "is over" in again.stderr
    (place.path / "enough").touch()
    assert place.begin().wait(GUARD_S) == 0  # the next one begins anew
    assert "the job before ended with status 5" in place.said()


@pytest.mark.campaign
@pytest.mark.slow
def test_ranks_that_do_not_heed_a_stop_are_killed_after_the_grace_though_the_driver_is_dead(place: Place) -> None:
    (place.path / "wait.py").write_text(SCRIPT.replace("SIGTERM, save", "SIGTERM, signal.SIG_IGN"))
    place.begin("--detach", "--set", "run.policy.grace_s=200").wait(GUARD_S)
    place.until(lambda: any("hello" in line for line in place.lines()))
    kill_driver(place)
    began_s = time.monotonic()
    assert place.call("stop", "--grace", "1").returncode == 0
    assert 1 <= time.monotonic() - began_s < 150
    assert psutil.wait_procs(place.processes(), GUARD_S)[1] == []


@pytest.mark.campaign
@pytest.mark.slow
def test_where_the_driver_is_about_to_be_started_again_the_next_one_stops_the_job(place: Place) -> None:
    place.begin("--detach").wait(GUARD_S)
    place.until(lambda: any("hello" in line for line in place.lines()))
    kill_driver(place, alone=True)
    stopped = place.call("stop", "--wait")
    assert stopped.returncode == 0 and "ended with status 5" in stopped.stdout, stopped
    assert (place.path / "saved-0").exists()
    assert psutil.wait_procs(place.processes(), GUARD_S)[1] == []


def test_help_lists_everything_with_examples() -> None:
    shown = CliRunner().invoke(group, ["run", "--help"]).output
    assert shown == CliRunner().invoke(group, ["run"]).output
    for word in ("status", "attach", "logs", "incidents", "stop", "drain", "evict", "return", "--detach", "Examples"):
        assert word in shown
    assert ":drive" not in shown
    for name in ("status", "attach", "logs", "incidents", "stop", "drain", "evict", "return"):
        assert "--folder" in CliRunner().invoke(group, ["run", name, "--help"]).output


def test_a_script_may_be_called_as_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    taken = CliRunner().invoke(group, ["run", "status"])
    assert "no job under runs/" in str(taken.exception)
    for name in ("status", "stop", "logs.py"):
        (tmp_path / name).touch()
    seen: list[str] = []
    monkeypatch.setattr("phalanx.cli.run_start._supervise", lambda given: seen.append(given.config.script) or 0)
    monkeypatch.setattr("phalanx.cli.run_start.end_with", lambda status: sys.exit(status))
    for words in (["--", "status"], ["--hosts", "2", "--", "stop", "now"], ["-m", "logs"]):
        assert CliRunner().invoke(group, ["run", *words]).exit_code == 0
    assert seen == ["status", "stop", "logs"]


def test_a_folder_without_a_job_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("status", "stop", "incidents", "logs", "attach"):
        result = CliRunner().invoke(group, ["run", name, "--folder", "nowhere"])
        assert "no job was ever run there" in str(result.exception)


def test_a_folder_for_checkpoints_is_made_or_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "t.py").touch()
    started: list[str] = []
    monkeypatch.setattr("phalanx.cli.run_start._supervise", lambda given: started.append(given.config.script) or 0)
    monkeypatch.setattr("phalanx.cli.run_start.end_with", lambda status: sys.exit(status))
    refused = CliRunner().invoke(group, ["run", "--set", "run.checkpoints=file/below", "t.py"])
    assert isinstance(refused.exception, UserError) and "cannot be made: Not a directory" in str(refused.exception)
    assert "run.checkpoints" in str(refused.exception) and not started
    assert CliRunner().invoke(group, ["run", "--set", "run.checkpoints=new/deep", "t.py"]).exit_code == 0
    assert (tmp_path / "new" / "deep").is_dir() and started == ["t.py"]
    for elsewhere in ("s3://bucket/run", ""):
        assert CliRunner().invoke(group, ["run", "--set", f"run.checkpoints={elsewhere}", "t.py"]).exit_code == 0


def test_a_grace_is_a_number_of_seconds_and_no_contradiction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[float | None] = []

    async def stop(found: object, grace_s: float | None, wait: bool) -> str:
        asked.append(grace_s)
        return "stopping"

    living = SimpleNamespace(life="running")
    monkeypatch.setattr("phalanx.cli.run_orders._unfinished", lambda folder: living)
    monkeypatch.setattr("phalanx.cli.run_orders._stop", stop)
    for words in ([], ["--now"], ["--grace", "90"], ["--now", "--grace", "0"]):
        assert CliRunner().invoke(group, ["run", "stop", *words]).exit_code == 0
    assert asked == [None, 0.0, 90.0, 0.0]
    assert "contradict" in str(CliRunner().invoke(group, ["run", "stop", "--now", "--grace", "5"]).exception)
    assert CliRunner().invoke(group, ["run", "stop", "--grace", "-1"]).exit_code == 2


@pytest.mark.slow
def test_a_job_without_a_supervisor_is_driven_by_the_command_itself(place: Place) -> None:
    (place.path / "enough").touch()
    command = place.begin("--no-supervisor")
    assert command.wait(GUARD_S) == 0, place.said()
    assert place.card()["pid"] == command.pid and place.card()["status"] == 0
    assert not (place.run / "supervisor.json").exists()
    assert any("bye" in line for line in place.lines())
