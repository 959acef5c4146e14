"""The kernel log, followed: overruns, floods, and hosts where it may not be read."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.checks.kernel_lines import KernelLine
from phalanx.run.executor.kernel_log import KernelLog, Kmsg, LogCommand, open_sources


def make(command: list[str]) -> LogCommand:
    return LogCommand(command, lambda start: start())


def read_until(log: KernelLog, count: int) -> list[KernelLine]:
    records: list[KernelLine] = []
    while len(records) < count:
        assert select.select([log.fileno()], [], [], 60)[0]
        records += log.read().records
    return records


def test_overwritten_records_are_counted_and_reading_goes_on(tmp_path: Path) -> None:
    """A pipe stands for the device; what it gives comes from here."""
    answers: list[bytes | OSError] = [
        b"6,1,2,-;one",
        BrokenPipeError(),
        b"6,9,2,-;two",
        BlockingIOError(),
        b"6,10,2,-;three",
        OSError(5, "Input/output error"),
    ]

    def read(descriptor: int, size: int) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    log = KernelLog([lambda: Kmsg(fifo, read)])
    assert log.source == str(fifo) and log.problem == ""
    taken = log.read()
    assert ([record.text for record in taken.records], taken.overruns) == (["one", "two"], 1)
    assert [record.text for record in log.read().records] == ["three"]
    assert log.problem == f"{fifo}: Input/output error" and log.fileno() == -1
    assert log.read().records == []


def test_a_flood_is_limited_and_warnings_go_first(tmp_path: Path) -> None:
    now = [0.0]
    lines = "".join(f"6,{number},0,-;chat\n" for number in range(50)) + "3,99,0,-;NVRM: Xid 79\n"
    program = f"import sys, time; sys.stdout.write({lines!r}); sys.stdout.flush()"
    log = KernelLog(
        [lambda: make([sys.executable, "-S", "-c", f"{program}; time.sleep(100)"])],
        per_s=10,
        burst=5,
        clock=lambda: now[0],
    )
    select.select([log.fileno()], [], [], 60)
    taken = log.read()
    assert [record.text for record in taken.records] == ["chat"] * 4 + ["NVRM: Xid 79"]
    assert taken.dropped == 46
    log.close()


def test_lines_of_the_kernel_since_a_moment_are_kept(tmp_path: Path) -> None:
    now = [10.0]
    reader, writer = os.pipe()
    log = KernelLog([lambda: Kmsg(Path(f"/dev/fd/{reader}"))], clock=lambda: now[0])
    os.write(writer, b"6,1,0,-;before")
    read_until(log, 1)
    now[0] = 20.0
    os.write(writer, b"6,2,0,-;after")
    read_until(log, 1)
    os.write(writer, b"12,3,0,-;written by a program")
    read_until(log, 1)
    assert log.since(15.0) == ["after"] and log.since(0.0) == ["before", "after"]
    log.close()
    for descriptor in (reader, writer):
        os.close(descriptor)


def test_where_nothing_may_be_read_it_is_said_why(tmp_path: Path) -> None:
    refuse = [sys.executable, "-S", "-c", "import sys; sys.exit('not permitted')"]
    log = KernelLog([lambda: Kmsg(tmp_path / "none"), lambda: make(refuse), lambda: make(["/no/such/program"])])
    assert (log.source, log.fileno()) == ("", -1)
    assert "No such file" in log.problem and "not permitted" in log.problem and "/no/such/program" in log.problem
    assert log.read().records == [] and log.since(0.0) == []


def test_the_next_source_is_taken_and_what_is_wrong_with_the_first_is_said(tmp_path: Path) -> None:
    program = "import time; print('[ 1.5] half', end=' ', flush=True); time.sleep(0.1); print('a line', flush=True)"
    log = KernelLog(
        [
            lambda: Kmsg(tmp_path / "none"),
            lambda: make([sys.executable, "-S", "-c", f"{program}; time.sleep(100)"]),
        ]
    )
    assert log.source == sys.executable and "No such file" in log.problem
    assert [record.text for record in read_until(log, 1)] == ["half a line"]
    log.close()


def test_this_host_s_log_is_followed_from_now_on() -> None:
    log = KernelLog(open_sources()[:1])
    if not log.source:
        pytest.skip(f"the kernel log may not be read here: {log.problem}")
    try:
        descriptor = os.open("/dev/kmsg", os.O_WRONLY)
    except OSError as error:
        pytest.skip(f"the kernel log may not be written to here: {error}")
    word = f"phalanx test {os.getpid()}"
    os.write(descriptor, f"{word}\n".encode())
    os.close(descriptor)
    texts: list[str] = []
    while word not in texts:
        assert select.select([log.fileno()], [], [], 60)[0]
        texts += [record.text for record in log.read().records]
    assert word not in log.since(0.0)  # no program can pass for the kernel
    log.close()


def test_a_program_that_follows_is_ended_with_the_log() -> None:
    started: list[subprocess.Popen] = []

    def start(begin: object) -> subprocess.Popen:
        started.append(begin())  # type: ignore[operator]
        return started[-1]

    source = LogCommand(["sleep", "100"], start)
    source.close()
    assert started[0].returncode is not None
