"""Signals to the launcher, from a terminal and otherwise; and what is left when it is killed."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")

RANKS = 2
GUARD_S = 240.0
PROGRAM = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from phalanx.launch.local_ranks import launch_local
status = launch_local({RANKS}, "launch_targets:" + sys.argv[1], (sys.argv[2], *map(int, sys.argv[3:])))
assert "torch" not in sys.modules and "numpy" not in sys.modules
sys.exit(status)
"""


@contextmanager
def launcher(
    target: str, folder: Path, *numbers: int, terminal: int | None = None, program: str = PROGRAM
) -> Iterator[subprocess.Popen[str]]:
    """A launcher whose ranks have written their process ids into `folder`; on `terminal` if one is given."""
    adopt = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n" if terminal is not None else ""
    process = subprocess.Popen(
        [sys.executable, "-c", adopt + program, target, str(folder), *map(str, numbers)],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE if terminal is None else terminal,
        start_new_session=terminal is not None,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + GUARD_S
        while len(list(folder.glob("pid-*"))) < RANKS and process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.communicate()


def processes(folder: Path) -> list[int]:
    """Descriptors of the ranks' processes."""
    return [os.pidfd_open(int((folder / f"pid-{rank}").read_text())) for rank in range(RANKS)]


def counts(folder: Path) -> list[dict[str, int]]:
    return [json.loads((folder / f"counts-{rank}").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_once_and_the_status_is_theirs(tmp_path: Path, number: signal.Signals) -> None:
    with launcher("count_signals", tmp_path, number) as process:
        process.send_signal(number)
        assert process.wait(GUARD_S) == 7
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert counts(tmp_path) == [{str(int(number)): 1}] * RANKS


def test_ctrl_c_in_a_terminal_reaches_every_rank_once(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with launcher("count_signals", tmp_path, signal.SIGINT, terminal=theirs) as process:
        os.write(ours, b"\x03")
        assert process.wait(GUARD_S) == 7
    assert counts(tmp_path) == [{str(int(signal.SIGINT)): 1}] * RANKS
    os.close(ours)
    os.close(theirs)


def test_ranks_that_a_signal_ends_are_no_failures(tmp_path: Path) -> None:
    with launcher("write_pid_and_wait", tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD_S) == 128 + signal.SIGTERM
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_an_interrupt_that_nobody_handles_is_one_line(tmp_path: Path) -> None:
    with launcher("write_pid_and_wait", tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(GUARD_S) == 128 + signal.SIGINT
        assert process.stderr is not None
        assert process.stderr.read() == f"interrupted, and so were all {RANKS} ranks\n"


def test_a_signal_while_the_template_imports_ends_all(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "import os, signal\n"
        f"from launch_targets import note\nfor rank in range({RANKS}):\n"
        f"    note({str(tmp_path)!r}, f'pid-{{rank}}', os.getpid())\n"
        "signal.pause()\n"
    )
    program = PROGRAM.replace('"launch_targets:" + ', "").replace(
        "sys.path[:0] = [", f"sys.path[:0] = [{str(tmp_path)!r}, "
    )
    with launcher("slow_to_import:function", tmp_path, program=program) as process:
        template, _ = processes(tmp_path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD_S) == 128 + signal.SIGTERM
        assert wait([template], GUARD_S)


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launcher("write_pid_and_wait", tmp_path) as process:
        ranks = processes(tmp_path)
        process.kill()
        for rank in ranks:
            assert wait([rank], GUARD_S)
            os.close(rank)


def test_no_rank_outlives_its_template_and_that_is_said(tmp_path: Path) -> None:
    with launcher("write_pid_and_wait", tmp_path) as process:
        ranks = processes(tmp_path)
        status = Path(f"/proc/{(tmp_path / 'pid-0').read_text()}/stat").read_text()
        os.kill(int(status.rpartition(")")[2].split()[1]), signal.SIGKILL)
        assert process.wait(GUARD_S) == 128 + signal.SIGKILL
        assert process.stderr is not None
        assert process.stderr.read() == "the template process was killed by SIGKILL; all ranks ended with it\n"
        for rank in ranks:
            assert wait([rank], GUARD_S)
            os.close(rank)


def test_ctrl_z_stops_the_ranks_too(tmp_path: Path) -> None:
    with launcher("count_signals", tmp_path, signal.SIGTERM) as process:
        pids = [process.pid, *(int((tmp_path / f"pid-{rank}").read_text()) for rank in range(RANKS))]
        process.send_signal(signal.SIGTSTP)
        await_state(pids, "T")
        process.send_signal(signal.SIGCONT)
        await_state(pids, "SR")
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD_S) == 7
    assert counts(tmp_path) == [{str(int(signal.SIGTERM)): 1}] * RANKS


def await_state(pids: list[int], states: str) -> None:
    deadline_s = time.monotonic() + GUARD_S
    while not all(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in states for pid in pids):
        assert time.monotonic() < deadline_s, f"not all of {pids} are in one of {states}"
        time.sleep(0.005)
