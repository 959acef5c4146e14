"""The pump between the pipes of ranks and their files: nothing is lost, nothing blocks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from phalanx.run.logs.log_files import RankLog, last_lines
from phalanx.run.logs.log_lines import Tails
from phalanx.run.logs.log_pump import Pump

GUARD_S = 240


class Heard:
    def __init__(self) -> None:
        self.lines: dict[int, list[str]] = {}
        self.came = asyncio.Event()

    def __call__(self, rank: int, lines: Sequence[str]) -> None:
        self.lines.setdefault(rank, []).extend(lines)
        self.came.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.came.clear()
            await asyncio.wait_for(self.came.wait(), GUARD_S)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def guarded() -> None:
        await asyncio.wait_for(work(), GUARD_S)

    asyncio.run(guarded())


def started(pump: Pump, rank: int, folder: Path, program: str, log: RankLog | None = None) -> subprocess.Popen:
    ours, theirs = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=theirs)
    os.close(theirs)
    pump.add(rank, ours, log or RankLog(folder, rank, 1))
    return process


def all_lines(folder: Path, rank: int | None = None) -> list[str]:
    return [line.text for line in last_lines(folder, rank, 10**9)]


def test_a_flood_of_several_ranks_arrives_whole(tmp_path: Path) -> None:
    program = "import sys\nfor i in range(100_000): print('line', i)\nsys.stderr.write('the end')"

    async def work() -> None:
        heard, tails = Heard(), Tails()
        pump = Pump(tails, heard, lambda: 1.5)
        processes = [started(pump, rank, tmp_path, program) for rank in range(2)]
        await pump.until_ended()
        await pump.close()
        for rank, process in enumerate(processes):
            assert process.wait(GUARD_S) == 0
            expected = [*(f"line {number}" for number in range(100_000)), "the end"]
            assert heard.lines[rank] == all_lines(tmp_path, rank) == expected
        assert [line.text for line in tails.newest() if line.rank == 0][-1] == "the end"
        assert pump.last_lines(0)[-2:] == ["line 99999", "the end"]

    run(work)


def test_the_last_words_of_a_killed_rank_are_kept(tmp_path: Path) -> None:
    program = (
        "import os\nfor i in range(3000): os.write(1, b'line %d\\n' % i)\n"
        "os.write(1, b'last words'); os.kill(os.getpid(), 9)"
    )

    async def work() -> None:
        pump = Pump(Tails(), Heard(), lambda: 1.5)
        process = started(pump, 0, tmp_path, program)
        await pump.until_ended()
        await pump.close()
        assert process.wait(GUARD_S) == -signal.SIGKILL
        assert all_lines(tmp_path) == [*(f"line {number}" for number in range(3000)), "last words"]

    run(work)


def test_what_is_in_a_pipe_is_taken_at_once_and_in_order(tmp_path: Path) -> None:
    async def work() -> None:
        heard = Heard()
        pump = Pump(Tails(), heard, lambda: 1.5)
        stuck = StuckLog(tmp_path, 0)
        ours, theirs = os.pipe()
        pump.add(0, ours, stuck)
        os.write(theirs, b"one\n")
        await heard.until(lambda: bool(heard.lines))
        os.write(theirs, b"two\nthree\nfour")
        pump.take_now(0)
        assert heard.lines[0] == ["one", "two", "three"] and pump.last_lines(0) == ["one", "two", "three", "four"]
        pump.take_now(0)
        pump.take_now(7)
        os.write(theirs, b" and five\n")
        os.close(theirs)
        stuck.goes_on.set()
        await pump.until_ended()
        pump.take_now(0)
        await pump.close()
        assert all_lines(tmp_path) == heard.lines[0] == ["one", "two", "three", "four and five"]

    run(work)


def test_closing_does_not_wait_for_somebody_who_holds_the_pipe(tmp_path: Path) -> None:
    async def work() -> None:
        heard = Heard()
        pump = Pump(Tails(), heard, lambda: 1.5)
        ours, theirs = os.pipe()
        pump.add(0, ours, RankLog(tmp_path, 0, 1))
        os.write(theirs, b"one\n 10%\r 20%")
        await heard.until(lambda: bool(heard.lines))
        assert pump.last_lines(0) == ["one", " 20%"]
        os.write(theirs, b"\ntwo\nthree")
        await pump.close()
        assert all_lines(tmp_path) == ["one", " 20%", "two", "three"]
        os.close(theirs)

    run(work)


def test_closing_does_not_wait_for_somebody_who_writes_for_ever(tmp_path: Path) -> None:
    async def work() -> None:
        heard = Heard()
        pump = Pump(Tails(), heard, lambda: 1.5)
        process = started(pump, 0, tmp_path, "import os\nwhile True: os.write(1, b'x' * 999 + b'\\n')")
        try:
            await heard.until(lambda: bool(heard.lines))
            await pump.close()
        finally:
            process.kill()
            process.wait(GUARD_S)
        lines = all_lines(tmp_path)
        assert lines
        assert set(lines[:-1]) <= {"x" * 999}
        assert ("x" * 999).startswith(lines[-1])

    run(work)


class StuckLog(RankLog):
    """A log on a disk that does not answer."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank, 1)
        self.goes_on = threading.Event()

    def write(self, lines: Sequence[str], unix_s: float) -> None:
        assert self.goes_on.wait(GUARD_S)
        super().write(lines, unix_s)


def test_a_slow_disk_slows_the_rank_and_neither_the_loop_nor_other_ranks(tmp_path: Path) -> None:
    async def work() -> None:
        heard = Heard()
        pump = Pump(Tails(), heard, lambda: 1.5)
        stuck = StuckLog(tmp_path, 0)
        ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        pump.add(0, ours, stuck)
        os.write(theirs, b"first\n")
        await heard.until(lambda: 0 in heard.lines)
        written = 0
        with pytest.raises(BlockingIOError):  # the pipe is full, and stays so: nobody reads
            while True:
                written += os.write(theirs, b"x" * 1023 + b"\n") // 1024
        other = started(pump, 1, tmp_path, "print('hello')")
        await heard.until(lambda: heard.lines.get(1) == ["hello"])
        assert other.wait(GUARD_S) == 0
        assert heard.lines[0] == ["first"]
        stuck.goes_on.set()
        os.close(theirs)
        await pump.until_ended()
        await pump.close()
        assert all_lines(tmp_path, 0) == ["first", *["x" * 1023] * written]
        assert all_lines(tmp_path, 1) == ["hello"]

    run(work)


def test_a_disk_that_refuses_does_not_stop_a_rank(tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_text("in the way")

    async def work() -> None:
        pump = Pump(Tails(), Heard(), lambda: 1.5)
        log = RankLog(tmp_path, 0, 1)
        process = started(pump, 0, tmp_path, "for i in range(50_000): print(i)", log)
        await pump.until_ended()
        assert process.wait(GUARD_S) == 0
        assert log.problem == "File exists"
        await pump.close()
        (tmp_path / "rank-0").unlink()
        log.write(["later"], 2.5)
        log.close()

    run(work)
    assert all_lines(tmp_path, 0) == ["[phalanx: 50000 lines could not be written: File exists]", "later"]


def test_who_listens_and_fails_is_reported_and_loses_no_line(tmp_path: Path) -> None:
    problems = []

    def fail(rank: int, lines: Sequence[str]) -> None:
        raise RuntimeError("a rule is wrong")

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context["exception"]))
        pump = Pump(Tails(), fail, lambda: 1.5)
        started(pump, 0, tmp_path, "print('hello')").wait(GUARD_S)
        await pump.until_ended()
        await pump.close()
        assert all_lines(tmp_path) == ["hello"]

    run(work)
    assert [str(problem) for problem in problems] == ["a rule is wrong"]


def test_a_bar_without_line_ends_does_not_starve_the_loop(tmp_path: Path) -> None:
    async def work() -> None:
        pump = Pump(Tails(), Heard(), lambda: 1.5)
        process = started(pump, 0, tmp_path, "import os\nwhile True: os.write(1, b'\\r%40d%%' % 7 * 1000)")
        try:
            while "7%" not in "".join(pump.last_lines(0)):
                await asyncio.sleep(0)
            for _ in range(100):
                await asyncio.sleep(0)
        finally:
            process.kill()
            process.wait(GUARD_S)
        await pump.until_ended()
        await pump.close()
        assert len(all_lines(tmp_path)) == 1

    run(work)


def test_no_descriptor_and_no_thread_stays(tmp_path: Path) -> None:
    async def work() -> None:
        pump = Pump(Tails(), Heard(), lambda: 1.5)
        for rank in range(4):
            started(pump, rank, tmp_path, "print('hello')").wait(GUARD_S)
        await pump.until_ended()
        await pump.close()

    run(work)
    before = len(list(Path("/proc/self/fd").iterdir()))
    run(work)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
