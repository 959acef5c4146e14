"""What /proc tells of processes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from phalanx.ipc.processes import descendants, is_dying, parse_stat, processes, read_process


def test_a_stat_line_is_read_whatever_the_name_of_the_process() -> None:
    fields = "S 1 2 3 0 -1 4 0 0 0 0 70 30 0 0 20 0 5 0 900 0 0"
    process = parse_stat(f"77 (a) b (c) {fields}".encode())
    assert process is not None
    assert (process.pid, process.name, process.state, process.parent) == (77, "a) b (c", "S", 1)
    assert (process.group, process.session, process.threads) == (2, 3, 5)
    assert (process.cpu_ticks, process.started_ticks) == (100, 900)
    assert parse_stat(b"") is None


def test_a_zombie_whose_threads_run_is_alive() -> None:
    fields = "Z 1 2 3 0 -1 4 0 0 0 0 70 30 0 0 20 0 {} 0 900 0 0"
    for threads, alive in ((2, True), (1, False), (0, False)):
        process = parse_stat(f"77 (a) {fields.format(threads)}".encode())
        assert process is not None and process.is_alive is alive


@pytest.mark.parametrize(
    ("flags", "own", "shared", "dying"),
    [
        ("4194304", "0000000000000000", "0000000000000000", False),
        ("4194308", "0000000000000000", "0000000000000000", True),  # PF_EXITING
        ("4195328", "0000000000000000", "0000000000000000", True),  # PF_SIGNALED
        ("4194304", "0000000000000100", "0000000000000000", True),  # SIGKILL waits for it
        ("4194304", "0000000000000000", "0000000000000100", True),
        ("4194304", "0000000000000200", "0000000000004000", False),  # SIGUSR1, SIGTERM
    ],
)
def test_who_is_dying(tmp_path: Path, flags: str, own: str, shared: str, dying: bool) -> None:
    (tmp_path / "77").mkdir()
    (tmp_path / "77" / "stat").write_text(f"77 (a) b) S 1 2 3 0 -1 {flags} 0 0 0 0 70 30 0 0 20 0 5 0 900 0 0")
    (tmp_path / "77" / "status").write_text(f"Name:\ta\nSigQ:\t1/2\nSigPnd:\t{own}\nShdPnd:\t{shared}\n")
    assert is_dying(77, tmp_path) is dying
    assert not is_dying(78, tmp_path)


def test_a_process_that_was_killed_is_dying_until_it_is_reaped() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        assert not is_dying(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_dying(process.pid)


def test_descendants_are_those_below_at_any_depth_whatever_else_there_is() -> None:
    fields = "S {} 2 3 0 -1 4 0 0 0 0 70 30 0 0 20 0 5 0 900 0 0"
    parents = {2: 1, 3: 2, 4: 3, 5: 1, 6: 6}
    found = (parse_stat(f"{pid} (a) {fields.format(parent)}".encode()) for pid, parent in parents.items())
    table = {process.pid: process for process in found if process is not None}
    assert descendants(table, [2]) == {3, 4}
    assert descendants(table, [1, 2]) == {2, 3, 4, 5}
    assert descendants(table, [9]) == set()


def test_this_process_is_in_the_table_and_one_that_is_not_there_is_none(tmp_path: Path) -> None:
    itself = processes()[os.getpid()]
    assert itself.parent == os.getppid() and itself.is_alive
    assert read_process(os.getpid(), tmp_path) is None
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_text("7 (a) S")
    assert read_process(7, tmp_path) is None and processes(tmp_path) == {}
