"""Log files: rotation, what is kept, full disks, last lines, and following over segments and attempts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.run.logs.log_files import (
    Follower,
    LoggedLine,
    RankLog,
    follow,
    last_lines,
    parsed,
    rank_folders,
    segments,
)

NOW_S = 1_795_294_398.123


def texts(lines: list[LoggedLine]) -> list[str]:
    return [line.text for line in lines]


def test_a_line_says_when_and_who(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 3, 2)
    log.write(["step 1", "", "ü \x1b[1m \ud800"], NOW_S)
    log.close()
    [segment] = segments(tmp_path / "rank-3")
    assert segment.path == tmp_path / "rank-3" / "attempt-0002.0001.log"
    assert segment.path.read_text() == (
        "2026-11-21T20:53:18.123Z [rank 3] step 1\n"
        "2026-11-21T20:53:18.123Z [rank 3] \n"
        "2026-11-21T20:53:18.123Z [rank 3] ü \x1b[1m ?\n"
    )
    assert last_lines(tmp_path, 3, 1) == [LoggedLine(3, 2, NOW_S, "ü \x1b[1m ?")]


@given(
    st.integers(0, 10**6), st.text(st.characters(blacklist_characters="\n", blacklist_categories=["Cs"])), st.floats()
)
def test_what_is_written_is_parsed(rank: int, text: str, unix_s: float) -> None:
    with TemporaryDirectory() as folder:
        log = RankLog(Path(folder), rank, 1)
        log.write([text], unix_s)
        log.close()
        [line] = last_lines(Path(folder), rank, 9)
    assert (line.rank, line.attempt, line.text) == (rank, 1, text)


@given(st.binary())
def test_what_nobody_wrote_is_taken_as_it_is(raw: bytes) -> None:
    assert parsed(raw, 7, 1).attempt == 1


def write_all(folder: Path, rank: int, attempt: int, count: int, **sizes: int) -> RankLog:
    log = RankLog(folder, rank, attempt, **sizes)
    for number in range(count):
        log.write([f"line {number:04d}"], NOW_S + number)
    log.close()
    return log


def test_segments_are_rotated_by_size_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    write_all(tmp_path, 0, 1, 100, segment_bytes=440, kept_bytes=100_000)  # ten lines of 44 bytes
    found = segments(tmp_path / "rank-0")
    assert [segment.number for segment in found] == list(range(1, 11))
    assert all(segment.path.stat().st_size == 440 for segment in found)
    write_all(tmp_path, 0, 2, 15, segment_bytes=440, kept_bytes=1800)
    found = segments(tmp_path / "rank-0")
    assert [(segment.attempt, segment.number) for segment in found] == [(1, 9), (1, 10), (2, 1), (2, 2)]
    assert sum(segment.path.stat().st_size for segment in found) <= 1800


@given(st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 200), max_size=20)), max_size=6))
def test_no_more_than_asked_for_is_ever_kept(attempts: list[tuple[int, list[int]]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, last = Path(name), None
        for attempt, sizes in attempts:
            log = RankLog(folder, 0, attempt, segment_bytes=500, kept_bytes=1500)
            for size in sizes:
                log.write(["x" * size], NOW_S)
                last = "x" * size
                assert sum(segment.path.stat().st_size for segment in segments(folder / "rank-0")) <= 1500
            log.close()
        if last is not None and len({attempt for attempt, _ in attempts}) == 1:
            assert texts(last_lines(folder, 0, 1)) == [last]


def test_a_line_larger_than_a_segment_is_still_written(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0, 1, segment_bytes=50, kept_bytes=50)
    log.write(["a", "x" * 1000, "b"], NOW_S)
    log.close()
    assert texts(last_lines(tmp_path, 0, 9)) == ["b"]


def test_a_second_writer_of_an_attempt_begins_a_new_segment(tmp_path: Path) -> None:
    for _ in range(2):
        write_all(tmp_path, 0, 1, 1)
    assert [segment.number for segment in segments(tmp_path / "rank-0")] == [1, 2]


def test_a_log_that_cannot_be_written_counts_and_says_so_later(tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_text("in the way")
    log = RankLog(tmp_path, 0, 1)
    log.write(["a", "b"], NOW_S)
    log.write(["c"], NOW_S)
    assert log.problem == "File exists"
    (tmp_path / "rank-0").unlink()
    log.write(["d"], NOW_S)
    log.close()
    assert log.problem == ""
    assert texts(last_lines(tmp_path, 0, 9)) == ["[phalanx: 3 lines could not be written: File exists]", "d"]


@pytest.fixture
def small_disk(tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_tears_no_later_line(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 40_000)
    log = RankLog(small_disk, 0, 1)
    log.write(["first"], NOW_S)
    log.write(["y" * 30_000], NOW_S)
    assert log.problem == "No space left on device"
    log.write(["lost"], NOW_S)
    filler.unlink()
    log.write(["last"], NOW_S)
    log.close()
    first, torn, note, last = last_lines(small_disk, 0, 9)
    assert (first.text, last.text) == ("first", "last")
    assert "yyy" in torn.text
    assert note.text == "[phalanx: 2 lines could not be written: No space left on device]"


def test_last_lines_over_segments_attempts_and_ranks(tmp_path: Path) -> None:
    write_all(tmp_path, 0, 1, 30, segment_bytes=440)
    write_all(tmp_path, 0, 2, 5, segment_bytes=440)
    assert texts(last_lines(tmp_path, 0, 7)) == [f"line {n:04d}" for n in (28, 29, 0, 1, 2, 3, 4)]
    assert [line.attempt for line in last_lines(tmp_path, 0, 7)] == [1, 1, 2, 2, 2, 2, 2]
    assert len(last_lines(tmp_path, 0, 1000)) == 35
    assert last_lines(tmp_path, 0, 0) == last_lines(tmp_path, 1, 5) == last_lines(tmp_path / "none", None, 5) == []
    log = RankLog(tmp_path, 1, 2)
    log.write(["other"], NOW_S + 3.5)
    log.close()
    assert texts(last_lines(tmp_path, None, 3)) == ["line 0003", "other", "line 0004"]


def test_last_lines_of_a_long_file_are_found_from_its_end(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0, 1)
    log.write([f"{number} {'x' * (number * 7919 % 9000)}" for number in range(200)], NOW_S)
    log.close()
    assert [int(line.text.split()[0]) for line in last_lines(tmp_path, 0, 150)] == list(range(50, 200))


def test_folders_of_hosts_are_looked_into(tmp_path: Path) -> None:
    for host, rank in (("a", 0), ("a", 1), ("b", 2), ("b", 0)):
        write_all(tmp_path / host, rank, 1, 1)
    (tmp_path / "rank-x").mkdir()
    assert [rank for rank, _ in rank_folders(tmp_path)] == [0, 0, 1, 2]
    assert len(last_lines(tmp_path, 0, 9)) == 2
    assert len(Follower(tmp_path).poll()) == 4


def test_following_over_segments_and_attempts_misses_and_repeats_nothing(tmp_path: Path) -> None:
    follower, seen = Follower(tmp_path, 0), []
    assert follower.poll() == []
    for attempt in (1, 2, 3):
        log = RankLog(tmp_path, 0, attempt, segment_bytes=200)
        for number in range(50):
            log.write([f"{attempt} {number}"], NOW_S)
            if number % 7 == 0:
                while lines := follower.poll():
                    seen += lines
        log.close()
    while lines := follower.poll():
        seen += lines
    follower.close()
    assert texts(seen) == [f"{attempt} {number}" for attempt in (1, 2, 3) for number in range(50)]
    assert [line.attempt for line in seen] == [attempt for attempt in (1, 2, 3) for _ in range(50)]


def test_a_follower_that_was_overtaken_goes_on_with_what_is_left(tmp_path: Path) -> None:
    follower = Follower(tmp_path, 0)
    log = RankLog(tmp_path, 0, 1, segment_bytes=200, kept_bytes=600)
    log.write(["first"], NOW_S)
    assert texts(follower.poll()) == ["first"]
    for number in range(100):
        log.write([str(number)], NOW_S)
    log.close()
    seen = []
    while lines := follower.poll():
        seen += texts(lines)
    assert seen[-5:] == ["95", "96", "97", "98", "99"]
    assert len(seen) < 100
    follower.close()


def test_a_line_is_given_when_it_is_whole_or_its_writer_has_gone(tmp_path: Path) -> None:
    folder = tmp_path / "rank-0"
    folder.mkdir()
    follower = Follower(tmp_path, 0)
    with (folder / "attempt-0001.0001.log").open("ab", buffering=0) as file:
        file.write(b"2026-11-21T20:53:18.123Z [rank 0] be")
        assert follower.poll() == []
        file.write(b"gun\n2026-11-21T20:53:19.000Z [rank 0] to")
        assert texts(follower.poll()) == ["begun"]
        file.write(b"rn")
        assert follower.poll() == []
    write_all(tmp_path, 0, 2, 1)
    assert texts([*follower.poll(), *follower.poll()]) == ["torn", "line 0000"]
    follower.close()


@pytest.mark.parametrize("last", [0, 1, 3, 100])
def test_following_from_the_last_lines(tmp_path: Path, last: int) -> None:
    log = RankLog(tmp_path, 0, 1, segment_bytes=100)
    log.write([str(number) for number in range(10)], NOW_S)
    follower = Follower(tmp_path, None, last=last)
    log.write(["new"], NOW_S)
    log.close()
    write_all(tmp_path, 5, 1, 1)
    seen = []
    while lines := follower.poll():
        seen += texts(lines)
    follower.close()
    assert sorted(seen) == sorted([*[str(number) for number in range(10)][10 - min(last, 10) :], "new", "line 0000"])


def test_following_since_a_time(tmp_path: Path) -> None:
    write_all(tmp_path, 0, 1, 10)
    follower = Follower(tmp_path, 0, since_unix_s=NOW_S + 7.5)
    assert texts(follower.poll()) == ["line 0008", "line 0009"]
    assert follower.poll() == []
    follower.close()


def test_follow_waits_only_when_there_is_nothing(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0, 1)
    log.write(["0"], NOW_S)
    waits = 0

    async def wait() -> None:
        nonlocal waits
        waits += 1
        log.write([str(waits)], NOW_S)

    async def read() -> list[str]:
        seen = []
        async for line in follow(tmp_path, None, wait):
            seen.append(line.text)
            if line.text == "5":
                return seen
        raise AssertionError

    assert asyncio.run(read()) == ["0", "1", "2", "3", "4", "5"]
    assert waits == 5
    log.close()
