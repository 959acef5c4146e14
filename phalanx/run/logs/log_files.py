"""Log files of ranks: ``rank-3/attempt-0002.0001.log``, a folder per rank, and in it a file per attempt, in segments.

Every line stands as ``2026-11-21T20:53:18.123Z [rank 3] text``. A segment that is full is followed by one with the next
number; nothing is renamed, so a reader that follows loses nothing. The oldest segments of a rank, of whatever attempt,
go when all together would take more than is to be kept. Lines are handed to the system at once, without fsync: a killed
process loses none, a power cut the last seconds.

Readers give the last lines, and follow files while they are written, over segments and attempts. A folder holds the
logs of one host, or folders of hosts that do. Lines of several ranks come in the order of their times, as far as they
are there together.
"""

from __future__ import annotations

import heapq
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path

from phalanx.core.files import lines_backwards

SEGMENT_BYTES = 32 << 20
KEPT_BYTES = 512 << 20
_BLOCK_BYTES = 1 << 18

_SEGMENT = re.compile(r"attempt-(\d+)\.(\d+)\.log")
_RANK = re.compile(r"rank-(\d+)")
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z \[rank (\d+)\] (.*)", re.DOTALL)


@dataclass(frozen=True, order=True)
class LogSegment:
    """A log file; in the order of their writing."""

    attempt: int
    number: int
    path: Path


@dataclass(frozen=True)
class LoggedLine:
    """A line of a rank. `unix_s`: when it was read from the rank, to the millisecond."""

    rank: int
    attempt: int
    unix_s: float
    text: str


def rank_folders(folder: Path, rank: int | None = None) -> list[tuple[int, Path]]:
    """Ranks that have a log in `folder`, or in a folder of a host within it."""
    found = []
    for path in (*folder.glob("rank-*"), *folder.glob("*/rank-*")):
        match = _RANK.fullmatch(path.name)
        if match and rank in (None, int(match[1])):
            found.append((int(match[1]), path))
    return sorted(found)


def segments(folder: Path) -> list[LogSegment]:
    """The log files of one rank, oldest first; empty where there are none."""
    try:
        paths = list(folder.iterdir())
    except OSError:
        return []
    found = ((_SEGMENT.fullmatch(path.name), path) for path in paths)
    return sorted(LogSegment(int(match[1]), int(match[2]), path) for match, path in found if match)


def parsed(raw: bytes, rank: int, attempt: int) -> LoggedLine:
    """A line of a file, without its end. One that was torn by a full disk comes as it is, without a time."""
    text = raw.decode(errors="replace")
    if match := _LINE.fullmatch(text):
        with suppress(ValueError):
            unix_s = datetime.fromisoformat(f"{match[1]}+00:00").timestamp()
            return LoggedLine(int(match[2]), attempt, unix_s, match[3])
    return LoggedLine(rank, attempt, 0.0, text)


class RankLog:
    """Writes the log of one rank in one attempt; never fails: what a full disk refuses is counted, and noted later.

    Not for several threads at once. Two writers of one rank and attempt write to segments of their own.

    Attributes:
        problem: why the last write failed; empty: it did not.
    """

    def __init__(
        self, folder: Path, rank: int, attempt: int, *, segment_bytes: int = SEGMENT_BYTES, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self._folder, self._rank, self._attempt = folder / f"rank-{rank}", rank, attempt
        self._segment_bytes, self._kept_bytes = min(segment_bytes, kept_bytes), kept_bytes
        self._descriptor = -1
        self._size = 0
        self._is_torn = False
        self._lost_lines = 0
        self.problem = ""

    def write(self, lines: Sequence[str], unix_s: float) -> None:
        """Append lines; what cannot be written is counted."""
        try:
            moment = datetime.fromtimestamp(unix_s, UTC)
        except (ValueError, OverflowError, OSError):  # of a clock that is beside itself
            moment = datetime.fromtimestamp(0, UTC)
        prefix = f"{moment.isoformat(timespec='milliseconds')[:-6]}Z [rank {self._rank}] "
        texts = [f"{prefix}{text}\n" for text in lines]
        if self._lost_lines:
            note = f"[phalanx: {self._lost_lines} lines could not be written: {self.problem}]"
            texts.insert(0, f"{prefix}{note}\n")
        try:
            self._append(texts)
            self.problem, self._lost_lines = "", 0
        except OSError as error:
            self.problem = error.strerror or str(error)
            self._lost_lines += len(lines)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, texts: Sequence[str]) -> None:
        block = bytearray()
        for text in texts:
            data = text.encode(errors="replace")
            if self._size + len(block) + len(data) > self._segment_bytes and self._size + len(block):
                self._put(block)
                block.clear()
                self.close()
            block += data
        self._put(block)

    def _put(self, block: bytearray) -> None:
        if not block:
            return
        if self._descriptor < 0:
            self._open()
        if self._is_torn:
            block.insert(0, ord("\n"))
        rest = memoryview(block)
        while rest:
            count = os.write(self._descriptor, rest)
            self._size += count
            self._is_torn = count < len(rest)
            rest = rest[count:]

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # The oldest segments go, until there is room for another one.
        old = []
        for segment in segments(self._folder):
            with suppress(OSError):
                old.append((segment.path, segment.path.stat().st_size))
        total = sum(size for _, size in old)
        for path, size in old:
            if total > self._kept_bytes - self._segment_bytes:
                path.unlink(missing_ok=True)
                total -= size
        numbers = [segment.number for segment in segments(self._folder) if segment.attempt == self._attempt]
        number = max(numbers, default=0)
        while self._descriptor < 0:
            number += 1
            path = self._folder / f"attempt-{self._attempt:04d}.{number:04d}.log"
            with suppress(FileExistsError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(path, flags, 0o644)
        self._size, self._is_torn = 0, False


def last_lines(folder: Path, rank: int | None, count: int) -> list[LoggedLine]:
    """The last `count` lines of a rank (None: of all ranks together), whatever attempts they are of."""
    return _last([list(_newest(rank, path, count)) for rank, path in rank_folders(folder, rank)], count)


def newest_first(folders: Sequence[tuple[int, Path]]) -> Iterator[LoggedLine]:
    """All lines of these `rank_folders`, the newest first, read as they are asked for."""
    each = [_newest(rank, path, sys.maxsize) for rank, path in reversed(folders)]
    return heapq.merge(*each, key=attrgetter("unix_s"), reverse=True)


class Follower:
    """Lines as they are written, call by call.

    Args:
        rank: None: all, also those that begin later.
        last: begin with so many of the lines that are there, as `last_lines` gives them; None: with the first.
        since_unix_s: leave out lines that are older.
    """

    def __init__(
        self, folder: Path, rank: int | None = None, *, last: int | None = None, since_unix_s: float = 0.0
    ) -> None:
        self._folder, self._rank, self._since_unix_s = folder, rank, since_unix_s
        self._files: dict[Path, _RankFile] = {}
        self._first: list[LoggedLine] = []
        if last is not None:
            there = rank_folders(folder, rank)
            self._files = {path: _RankFile(number, path, at_end=True) for number, path in there}
            self._first = _last([self._files[path].newest(last) for _, path in there], last)

    def poll(self) -> list[LoggedLine]:
        """The lines that have come since the last call, up to some megabytes; empty: there are none now."""
        while True:
            first, self._first = self._first, []
            for rank, path in rank_folders(self._folder, self._rank):
                if path not in self._files:
                    self._files[path] = _RankFile(rank, path)
            new = heapq.merge(*(file.poll() for file in self._files.values()), key=attrgetter("unix_s"))
            lines = [*first, *new]
            if kept := [line for line in lines if line.unix_s >= self._since_unix_s]:
                return kept
            if not lines:
                return []

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


async def follow(
    folder: Path,
    rank: int | None,
    wait: Callable[[], Awaitable[object]],
    *,
    last: int | None = None,
    since_unix_s: float = 0.0,
) -> AsyncIterator[LoggedLine]:
    """Lines as they are written, for ever.

    Args:
        folder, rank, last, since_unix_s: as for `Follower`.
        wait: awaited when there is nothing new, such as ``lambda: asyncio.sleep(0.2)``; what it raises ends this.
    """
    follower = Follower(folder, rank, last=last, since_unix_s=since_unix_s)
    try:
        while True:
            lines = follower.poll()
            for line in lines:
                yield line
            if not lines:
                await wait()
    finally:
        follower.close()


class _RankFile:
    """The log of one rank: the segment that is being read, and how far."""

    def __init__(self, rank: int, folder: Path, *, at_end: bool = False) -> None:
        self._rank, self._folder = rank, folder
        self._segment: LogSegment | None = None
        self._descriptor = -1
        self._partial = b""
        if at_end and (there := segments(folder)):
            self._open(there[-1])
            if self._descriptor >= 0:  # after the last whole line
                start = os.lseek(self._descriptor, 0, os.SEEK_END)
                while start > 0:
                    begin = max(start - _BLOCK_BYTES, 0)
                    end = os.pread(self._descriptor, start - begin, begin).rfind(b"\n")
                    start = begin
                    if end >= 0:
                        start = begin + end + 1
                        break
                os.lseek(self._descriptor, start, os.SEEK_SET)

    def poll(self) -> list[LoggedLine]:
        """New lines, up to a block of them, or none."""
        while True:
            there = segments(self._folder)  # before reading: once there is a later segment, this one is complete
            while self._descriptor >= 0 and (block := os.read(self._descriptor, _BLOCK_BYTES)):
                *lines, self._partial = (self._partial + block).split(b"\n")
                if lines:
                    return [self._line(line) for line in lines]
            later = [segment for segment in there if self._segment is None or segment > self._segment]
            if not later:
                return []
            torn = [self._line(self._partial)] if self._partial else []  # the writer died within a line
            self._open(later[0])
            if torn:
                return torn

    def newest(self, count: int) -> list[LoggedLine]:
        """The last `count` lines before the place where reading stands, newest first."""
        if self._segment is None or self._descriptor < 0:
            return []
        return list(
            _newest(self._rank, self._folder, count, (self._segment, os.lseek(self._descriptor, 0, os.SEEK_CUR)))
        )

    def close(self) -> None:
        """Close the segment."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, segment: LogSegment) -> None:
        self.close()
        self._segment, self._partial = segment, b""
        try:
            self._descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # it was the oldest, and has just gone
            self._descriptor = -1

    def _line(self, raw: bytes) -> LoggedLine:
        return parsed(raw, self._rank, self._segment.attempt if self._segment else 0)


def _last(newest: list[list[LoggedLine]], count: int) -> list[LoggedLine]:
    """Of lines of each rank, newest first, the last `count` of all, in order."""
    return list(heapq.merge(*(lines[::-1] for lines in newest), key=attrgetter("unix_s")))[-count:] if count > 0 else []


def _newest(rank: int, folder: Path, count: int, end: tuple[LogSegment, int] | None = None) -> Iterator[LoggedLine]:
    """The last `count` lines of one rank, newest first; of those before a byte of a segment, if one is given."""
    there = [segment for segment in segments(folder) if end is None or segment <= end[0]]
    for segment in reversed(there):
        for raw in _backwards(segment.path, end[1] if end and segment == end[0] else None):
            if count <= 0:
                return
            count -= 1
            yield parsed(raw, rank, segment.attempt)


def _backwards(path: Path, size: int | None) -> Iterator[bytes]:
    """Lines of the first `size` bytes of a file, the last first; without their ends."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        yield from lines_backwards(file, size)
