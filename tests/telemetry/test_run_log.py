"""Log files of a run: what is written, whatever the disk and the terminal do, and what readers find."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from phalanx.telemetry import run_log
from phalanx.telemetry.config import LoggingConfig
from phalanx.telemetry.run_log import RunLog, copy_stderr, log_path, open_log
from phalanx.telemetry.run_log_lines import Follower, Wanted, last_lines, log_files

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ \[rank \d+ start \d+\] .*")


def opened(run: Path, rank: int = 0, start: int = 1, *, ranks: int = 1, size: int = 1 << 20, files: int = 4) -> RunLog:
    return RunLog(log_path(run, rank, ranks, "node/7"), rank, start, file_bytes=size, files=files)


def texts(run: Path, count: int = 1000, wanted: Wanted | None = None) -> list[str]:
    return [line.text for line in last_lines(run, count, wanted or Wanted())]


def test_every_line_has_a_time_a_level_a_rank_and_a_start_and_later_starts_append(tmp_path: Path) -> None:
    for start in (1, 2):
        log = opened(tmp_path, start=start)
        log.note("two\nlines")
        try:
            raise ValueError("wrong\nin two lines")
        except ValueError as error:
            log.error(error, "ended: ValueError: wrong")
        log.close()
        log.close()
    content = (tmp_path / "logs/train.log").read_text()
    assert all(LINE.fullmatch(line) for line in content.splitlines())
    lines = last_lines(tmp_path, 1000)
    assert [line.start for line in lines if line.text == "two"] == [1, 2]
    assert {line.level for line in lines if "wrong" in line.text} == {"ERROR"}
    assert [line.text for line in lines][2] == "Traceback (most recent call last):"
    assert lines[0].unix_s <= lines[-1].unix_s
    assert lines[0].host == ""


def test_a_full_file_is_followed_by_another_and_the_oldest_goes(tmp_path: Path) -> None:
    log = opened(tmp_path, size=1000, files=3)
    follower = Follower(tmp_path, 0)
    followed = []
    for number in range(100):
        log.note(f"line {number}")
        if number % 7 == 0:
            followed += [line.text for line in follower.poll()]
    log.close()
    followed += [line.text for line in follower.poll()]
    assert followed == [f"line {number}" for number in range(100)]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["train.log", "train.log.1", "train.log.2"]
    kept = texts(tmp_path)
    assert kept == [f"line {number}" for number in range(100 - len(kept), 100)]
    assert 30 < len(kept) < 60
    assert texts(tmp_path, 5) == [f"line {number}" for number in range(95, 100)]


def test_ranks_are_merged_by_time_and_chosen(tmp_path: Path) -> None:
    logs = [opened(tmp_path, rank, ranks=12) for rank in (0, 11)]
    for number in range(6):
        logs[number % 2].note(f"line {number}", "INFO" if number < 5 else "ERROR")
        logs[number % 2].note("")
    for log in logs:
        log.close()
    assert [(file.rank, file.host) for file in log_files(tmp_path)] == [(0, "node_7"), (11, "node_7")]
    by_time = [line.unix_s for line in last_lines(tmp_path, 100)]
    assert by_time == sorted(by_time) and len(by_time) == 12
    assert texts(tmp_path, 9, Wanted(rank=11, pattern=re.compile("line"))) == ["line 1", "line 3", "line 5"]
    assert texts(tmp_path, 1, Wanted(pattern=re.compile("line [0-3]"))) == ["line 3"]
    assert texts(tmp_path, 9, Wanted(level="WARNING")) == ["line 5"]
    assert texts(tmp_path, 9, Wanted(since_unix_s=by_time[-1] + 1)) == []
    assert last_lines(tmp_path / "none", 5) == []


def test_following_begins_with_the_last_lines_and_shows_each_once(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for number in range(5):
        log.note(f"line {number}")
    follower = Follower(tmp_path, 2)
    log.note("line 5")
    other = opened(tmp_path, 3, ranks=4)
    other.note("another rank")
    assert [line.text for line in follower.poll()] == ["line 3", "line 4", "line 5", "another rank"]
    assert follower.poll() == []
    follower.close()
    log.close()
    other.close()


def test_lines_without_a_prefix_belong_to_the_one_before(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.note("before")
    log.close()
    path = tmp_path / "logs/train.log"
    path.write_text(path.read_text() + "Fatal Python error: Segmentation fault\n\n  File x\n")
    opened(tmp_path, start=2).note("after")
    lines = last_lines(tmp_path, 9)
    crash = ["Fatal Python error: Segmentation fault", "", "  File x"]
    assert [line.text for line in lines] == ["before", *crash, "after"]
    assert {(line.unix_s, line.level, line.start) for line in lines[1:4]} == {(lines[0].unix_s, "", 1)}


def test_a_full_disk_is_counted_and_told_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, real, room = opened(tmp_path), os.write, [200]

    def write(descriptor: int, block: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, block[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(run_log.os, "write", write)
    for number in range(6):
        log.note(f"line {number} " + "x" * 60)
    assert log.problem == "No space left on device"
    room[0] = 10**6
    log.note("there is room")
    log.close()
    assert log.problem == ""
    kept = texts(tmp_path)
    assert kept[-2:] == ["5 lines could not be written: No space left on device", "there is room"]
    assert (tmp_path / "logs/train.log").read_text().count("there is room\n") == 1


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file is in the way")
    with open_log(LoggingConfig(), log_path(tmp_path, 0, 1, "h"), 0, 1, "now") as log:
        assert log is not None and "exist" in log.problem
        print("to stderr", file=sys.stderr)
    with open_log(LoggingConfig(file_bytes=0), log_path(tmp_path, 0, 1, "h"), 0, 1, "now") as log:
        assert log is None


def test_stderr_goes_to_the_terminal_and_into_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    library = logging.Logger("a library")
    held = logging.StreamHandler()  # made before, holds the stream itself
    library.addHandler(held)
    monkeypatch.setitem(logging.Logger.manager.loggerDict, "a library", library)
    with open_log(LoggingConfig(), log_path(tmp_path, 0, 1, "h"), 0, 1, "now"):
        print("printed", file=sys.stderr)
        library.warning("logged")
        sys.stderr.write("10%\r50%\r")
        sys.stderr.write("100%\n")
        sys.stderr.write("no end")
        assert sys.stderr.getvalue().startswith("printed")  # all else is the stream's own
    assert sys.stderr is terminal and held.stream is terminal
    shown = terminal.getvalue()
    assert shown.startswith("printed\nlogged\n") and "10%\r50%\r100%\n" in shown and shown.endswith("no end")
    lines = last_lines(tmp_path, 99, Wanted(level="STDERR"))
    found = [line.text for line in lines]
    assert found[:2] == ["printed", "logged"] and "100%" in found and found[-1] == "no end"
    assert {line.level for line in lines} == {"STDERR"}


def test_a_live_display_takes_stderr_and_the_log_still_gets_it(tmp_path: Path) -> None:
    from rich.live import Live

    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with open_log(LoggingConfig(), log_path(tmp_path, 0, 1, "h"), 0, 1, "now") as log:
        assert log is not None
        before = sys.stderr
        with Live("drawn", console=console, auto_refresh=False):
            copy_stderr(log)
            print("while it is drawn", file=sys.stderr)
        assert sys.stderr is before
    assert texts(tmp_path)[-1] == "while it is drawn"
    written: Any = console.file
    assert "while it is drawn" in written.getvalue()


def test_a_crash_in_native_code_says_where(tmp_path: Path) -> None:
    script = (
        "import ctypes, sys\nfrom pathlib import Path\n"
        "from phalanx.telemetry.config import LoggingConfig\nfrom phalanx.telemetry.run_log import log_path, open_log\n"
        "import logging, warnings\n"
        "def crashes(): ctypes.string_at(0)\n"
        "with open_log(LoggingConfig(file_bytes=300), log_path(Path(sys.argv[1]), 0, 1, 'h'), 0, 1, 'now') as log:\n"
        "    for n in range(9): log.note('so that it is another file by now')\n"
        "    warnings.warn('a warning')\n"
        "    logging.getLogger('x').warning('by the last resort')\n"
        "    crashes()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr
    found = (tmp_path / "logs/train.log").read_text()
    assert "Segmentation fault" in found and "in crashes" in found
    assert any("in crashes" in text for text in texts(tmp_path, 50))
    assert ended.stderr == "<string>:9: UserWarning: a warning\nby the last resort\n"  # as without a log
    assert [line.text for line in last_lines(tmp_path, 50) if line.level == "STDERR"] == ended.stderr.splitlines()


def test_a_link_in_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    """Whoever may write into a run folder would have others read files to them that they may not read themselves."""
    (tmp_path / "secret").write_text("2026-11-25T19:01:02.123Z INFO [rank 0 start 1] a secret\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/train.log").symlink_to(tmp_path / "secret")
    assert texts(tmp_path) == []
    (tmp_path / "logs/train.log").unlink()
    (tmp_path / "secret").rename(tmp_path / "logs/train.log")
    assert texts(tmp_path) == ["a secret"]
