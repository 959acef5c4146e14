"""Reading the log files of a run (`phalanx.telemetry.run_log` writes them): the last lines, and those that come.

Lines of several ranks come in the order of their times, as far as they are there together. Reading begins at the ends
of files, so that the last lines of a large log cost little.
"""

from __future__ import annotations

import heapq
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO

from phalanx.core.files import lines_backwards, open_regular
from phalanx.telemetry.run_log import FOLDER

LEVELS = ("DEBUG", "INFO", "WARNING", "STDERR", "ERROR", "CRITICAL")
"""From the least: what libraries write to stderr counts as a warning."""

_BLOCK_BYTES = 1 << 18
_FILE = re.compile(r"(?:train|rank-(\d+)\.([A-Za-z0-9_-]+))\.log(?:\.(\d+))?")
_LINE = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z (\w+) \[rank (\d+) start (\d+)\] (.*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class LogFile:
    """The newest file of a rank. `host`: as the file's name has it; empty for a run of one process."""

    rank: int
    host: str
    path: Path


@dataclass(frozen=True)
class LogLine:
    """A line of a rank.

    Attributes:
        unix_s: when it was written, to the millisecond; 0: not known.
        level: one of `LEVELS`, or another of Python's logging; empty: a line without a prefix, of a crash.
        start: of which start of the run; 0: not known.
    """

    unix_s: float
    level: str
    rank: int
    start: int
    host: str
    text: str


@dataclass(frozen=True)
class Wanted:
    """Which lines are shown: of a rank (None: of all), not older, that match, of a level or above it."""

    rank: int | None = None
    since_unix_s: float = 0.0
    pattern: re.Pattern[str] | None = None
    level: str = ""

    def takes(self, line: LogLine) -> bool:
        """Whether `line` is one of them, but for its rank."""
        if line.unix_s < self.since_unix_s:
            return False
        if self.pattern is not None and not self.pattern.search(line.text):
            return False
        known = line.level in LEVELS and self.level in LEVELS
        return not known or LEVELS.index(line.level) >= LEVELS.index(self.level)


ALL = Wanted()


def log_files(run: Path, rank: int | None = None) -> list[LogFile]:
    """The newest log file of each rank, in order of rank; empty where there are none."""
    try:
        # A link may lead to a file of this user that whoever made the run folder may not read.
        names = sorted(path.name for path in (run / FOLDER).iterdir() if not path.is_symlink())
    except OSError:
        return []
    found = []
    for name in names:
        match = _FILE.fullmatch(name)
        if match and match[3] is None and rank in (None, int(match[1] or 0)):
            found.append(LogFile(int(match[1] or 0), match[2] or "", run / FOLDER / name))
    return sorted(found, key=lambda file: (file.rank, file.host))


def last_lines(run: Path, count: int, wanted: Wanted = ALL) -> list[LogLine]:
    """The last `count` of the lines that are wanted, oldest first."""
    return _last([_backwards(file, wanted) for file in log_files(run, wanted.rank)], count)


def newest_first(files: Sequence[LogFile]) -> Iterator[LogLine]:
    """All lines of these files and their older parts, the newest first, read as they are asked for."""
    return _merged([_backwards(file, ALL) for file in files])


def _merged(newest: list[Iterator[LogLine]]) -> Iterator[LogLine]:
    # Reversed, so that of lines of one millisecond those of the lower rank come first when all are turned around.
    return heapq.merge(*reversed(newest), key=attrgetter("unix_s"), reverse=True)


def _last(newest: list[Iterator[LogLine]], count: int) -> list[LogLine]:
    """Of lines of each rank, newest first, the last `count` of all, in order."""
    return list(itertools.islice(_merged(newest), max(count, 0)))[::-1]


class Follower:
    """Lines as they are written, call by call.

    Args:
        last: begin with so many of those that are there.
    """

    def __init__(self, run: Path, last: int, wanted: Wanted = ALL) -> None:
        self._run, self._wanted = run, wanted
        self._files = {file.path: _Growing(file, at_end=True) for file in log_files(run, wanted.rank)}
        self._first = _last([growing.before(wanted) for growing in self._files.values()], last)

    def poll(self) -> list[LogLine]:
        """The lines that have come since the last call; empty: there are none now."""
        first, self._first = self._first, []
        for file in log_files(self._run, self._wanted.rank):
            if file.path not in self._files:
                self._files[file.path] = _Growing(file)
        come = heapq.merge(*(file.poll() for file in self._files.values()), key=attrgetter("unix_s"))
        return [*first, *filter(self._wanted.takes, come)]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class _Growing:
    """A file that is written to and now and then renamed; an open file is read to its end whatever it is called."""

    def __init__(self, file: LogFile, *, at_end: bool = False) -> None:
        self._file, self._partial, self._before = file, b"", LogLine(0.0, "", file.rank, 0, file.host, "")
        self._open = None if not at_end else self._opened()
        self._from = 0 if self._open is None else self._open.seek(0, os.SEEK_END)

    def before(self, wanted: Wanted) -> Iterator[LogLine]:
        """The wanted lines before the place where reading began, newest first."""
        return _backwards(self._file, wanted, self._from)

    def poll(self) -> list[LogLine]:
        """Lines that have come."""
        lines: list[LogLine] = []
        for _ in range(2):  # the file that is open, then the one that has taken its place
            self._open = self._open or self._opened()
            if self._open is None:
                return lines
            # Asked before reading: once another file has the name, this one gets no more.
            is_renamed = self._is_renamed()
            while block := self._open.read(_BLOCK_BYTES):
                *whole, self._partial = (self._partial + block).split(b"\n")
                for raw in whole:
                    self._before = _parsed(raw, self._file, self._before)
                    lines.append(self._before)
            if not is_renamed:
                return lines
            self.close()
        return lines

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _opened(self) -> BinaryIO | None:
        try:
            return open_regular(self._file.path)
        except OSError:
            return None

    def _is_renamed(self) -> bool:
        assert self._open is not None
        try:
            now, ours = self._file.path.stat(), os.fstat(self._open.fileno())
        except OSError:  # between two files, or the folder is gone
            return False
        return (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino)


def _parsed(raw: bytes, file: LogFile, before: LogLine) -> LogLine:
    """A line of a file; one without a prefix has the time, rank and start of the line before it."""
    text = raw.decode(errors="replace")
    if match := _LINE.fullmatch(text):
        try:
            unix_s = datetime.fromisoformat(f"{match[1]}+00:00").timestamp()
            return LogLine(unix_s, match[2], int(match[3]), int(match[4]), file.host, match[5])
        except (ValueError, OverflowError):
            pass
    return LogLine(before.unix_s, "", before.rank, before.start, file.host, text)


def _backwards(file: LogFile, wanted: Wanted, end: int | None = None) -> Iterator[LogLine]:
    """The wanted lines of a rank, newest first, through its older files; of the newest one those before `end`."""
    orphans: list[bytes] = []  # lines without a prefix, whose line before has not been read yet
    for number in itertools.count():
        path = file.path if number == 0 else file.path.with_name(f"{file.path.name}.{number}")
        try:
            raws = _raw_backwards(path, end if number == 0 else None)
            first = next(raws, None)
        except OSError:
            if number:
                break
            continue  # being renamed just now
        for raw in itertools.chain([] if first is None else [first], raws):
            if not _LINE.fullmatch(raw.decode(errors="replace")):
                orphans.append(raw)
                continue
            line = _parsed(raw, file, LogLine(0.0, "", file.rank, 0, file.host, ""))
            if line.unix_s < wanted.since_unix_s:
                return
            # What a crash wrote comes after its line, and here before.
            for orphan in orphans:
                if wanted.takes(follows := _parsed(orphan, file, line)):
                    yield follows
            orphans.clear()
            if wanted.takes(line):
                yield line
    nothing = LogLine(0.0, "", file.rank, 0, file.host, "")
    yield from filter(wanted.takes, (_parsed(raw, file, nothing) for raw in orphans))


def _raw_backwards(path: Path, end: int | None) -> Iterator[bytes]:
    """The lines of a file, last first, without their ends; of its first `end` bytes, None: of all."""
    with open_regular(path) as file:
        yield from lines_backwards(file, end)
