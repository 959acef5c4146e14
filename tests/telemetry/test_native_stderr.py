"""What native code writes to fd 2 is shown as before and stands in the log, whatever becomes of the process."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.core.progress import PROGRESS_VARIABLE
from phalanx.telemetry.stderr_relay import LogCopy

_PROGRAM = """
import os, sys, signal, subprocess, logging
from pathlib import Path
from phalanx.telemetry.config import LoggingConfig
from phalanx.telemetry.run_log import open_log
with open_log(LoggingConfig(), Path(sys.argv[1]), 0, 1, "a test") as log:
    {body}
"""


def program(log: Path, body: str) -> list[str]:
    text = _PROGRAM.format(body=body.replace("\n", "\n    "))
    return [sys.executable, "-c", text, str(log)]


def ran(log: Path, body: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    everything = {name: value for name, value in os.environ.items() if name != PROGRESS_VARIABLE}
    return subprocess.run(
        program(log, body), capture_output=True, check=False, timeout=120, env=everything | environ
    )  # the pipe of stderr ends when the relay has ended, too


def lines_of(log: Path, text: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if text in line]


def test_native_lines_are_shown_and_logged_once_and_python_lines_too(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    done = ran(log, "os.write(2, b'[W] from C++\\n')\nprint('from Python', file=sys.stderr)\nos.write(2, b'no end')")
    assert done.returncode == 0
    assert done.stderr.count(b"[W] from C++") == 1
    assert done.stderr.count(b"from Python") == 1
    assert done.stderr.count(b"no end") == 1
    (native,) = lines_of(log, "[W] from C++")
    assert " STDERR [rank 0 start 1] [W] from C++" in native
    assert len(lines_of(log, "from Python")) == len(lines_of(log, "no end")) == 1


@pytest.mark.parametrize(
    ("end", "number"),
    [("os.abort()", signal.SIGABRT), ("os.kill(os.getpid(), 11)", signal.SIGSEGV), ("os.kill(os.getpid(), 9)", 9)],
)
def test_the_last_words_of_a_process_that_crashes_are_in_the_log(tmp_path: Path, end: str, number: int) -> None:
    log = tmp_path / "train.log"
    done = ran(log, f"os.write(2, b'terminate called: ' + b'x' * 60000 + b' the last word\\n')\n{end}")
    assert done.returncode == -number
    assert b"the last word" in done.stderr
    assert len(lines_of(log, "the last word")) == 1


def test_what_children_write_is_taken_and_a_relay_that_is_killed_costs_nothing_more(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    body = """
subprocess.run(["sh", "-c", "echo from a child >&2"])
import psutil
(relay,) = psutil.Process().children()
before = os.fstat(2).st_ino
relay.kill()
while os.fstat(2).st_ino == before:
    pass
os.write(2, b'after the relay\\n')
print('and Python', file=sys.stderr)
"""
    done = ran(log, body)
    assert done.returncode == 0, done.stderr
    for text in (b"after the relay", b"and Python"):
        assert done.stderr.count(text) == 1
    assert lines_of(log, "and Python")


def test_a_terminal_stays_one_for_python_and_ctrl_c_reaches_only_the_program(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    body = """
print("terminal" if sys.stderr.isatty() else "pipe", file=sys.stderr)
os.write(2, b'before\\n')
try:
    os.kill(0, signal.SIGINT)
except KeyboardInterrupt:
    os.write(2, b'native, interrupted\\n')
"""
    ours, theirs = pty.openpty()
    with subprocess.Popen(program(log, body), stderr=theirs, stdout=theirs, start_new_session=True) as process:
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 4096):
                shown += block
        except OSError:  # how a terminal ends
            pass
        assert process.wait(60) == 0, shown
    os.close(ours)
    assert b"terminal" in shown
    assert b"native, interrupted" in shown
    assert lines_of(log, "native, interrupted")


def test_where_phalanx_run_has_the_output_nothing_is_redirected(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    done = ran(log, "os.write(2, b'native\\n')", **{PROGRESS_VARIABLE: str(tmp_path / "page")})
    assert b"native" in done.stderr
    assert not lines_of(log, "native")


def test_nccl_writes_to_stderr_where_stdout_goes_there_too(tmp_path: Path) -> None:
    show = "print(os.environ.get('NCCL_DEBUG_FILE'))"
    done = ran(tmp_path / "train.log", show, NCCL_DEBUG="INFO")
    assert done.stdout == b"None\n", "two pipes"
    both = subprocess.run(
        program(tmp_path / "train.log", show), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True,
        timeout=120, env=os.environ | {"NCCL_DEBUG": "INFO"},
    )  # fmt: skip
    assert b"/dev/stderr" in both.stdout


def test_a_copy_keeps_the_last_state_of_a_line_and_counts_what_a_full_log_refuses(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    copy = LogCopy(str(log), "[rank 1 start 2]", 200)
    copy.feed(b"10%\r50%\r100%\nhalf")
    copy.close()
    assert [line.partition("] ")[2] for line in log.read_text().splitlines()] == ["100%", "half"]
    copy.feed(b"x" * 200 + b"\n")
    copy.feed(b"too much\n" * 3)
    assert "too much" not in log.read_text()
    log.rename(tmp_path / "train.log.1")  # as the rank does
    copy.feed(b"news\n")
    told, news = log.read_text().splitlines()
    assert told.endswith("WARNING [rank 1 start 2] 3 lines of stderr were left out")
    assert news.endswith("STDERR [rank 1 start 2] news")
