"""Log files of ranks: ``rank-3/attempt-0002.0001.log``, a folder per rank, and in it a file per attempt, in segments.

Every line stands as ``2026-11-21T20:53:18.123Z [rank 3] text``. A segment that is full is followed by one with the next
number; nothing is renamed, so a reader that follows loses nothing. The oldest segments of a rank, of whatever attempt,
go when all together would take more than is to be kept. Lines are handed to the system at once, without fsync: a killed
process loses none, a power cut the last seconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

SEGMENT_BYTES = 32 << 20
KEPT_BYTES = 512 << 20

_SEGMENT = re.compile(r"attempt-(\d+)\.(\d+)\.log")
_RANK = re.compile(r"rank-(\d+)")
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})Z \[rank (\d+)\] (.*)", re.DOTALL)


@dataclass(frozen=True, order=True)
class Segment:
    """A log file; in the order of their writing."""

    attempt: int
    number: int
    path: Path


@dataclass(frozen=True)
class Line:
    """A line of a rank.

    Attributes:
        unix_s: when it was read from the rank, to the millisecond.
    """

    rank: int
    attempt: int
    unix_s: float
    text: str


def rank_folder(folder: Path, rank: int) -> Path:
    """Where the log of a rank is."""
    return folder / f"rank-{rank}"


def rank_folders(folder: Path, rank: int | None = None) -> list[tuple[int, Path]]:
    """Ranks that have a log in `folder`, or in a folder of a host within it."""
    found = []
    for path in (*folder.glob("rank-*"), *folder.glob("*/rank-*")):
        match = _RANK.fullmatch(path.name)
        if match and rank in (None, int(match[1])):
            found.append((int(match[1]), path))
    return sorted(found)


def segments(folder: Path) -> list[Segment]:
    """The log files of one rank, oldest first; empty where there are none."""
    try:
        paths = list(folder.iterdir())
    except OSError:
        return []
    found = ((_SEGMENT.fullmatch(path.name), path) for path in paths)
    return sorted(Segment(int(match[1]), int(match[2]), path) for match, path in found if match)


def written(rank: int, text: str, unix_s: float) -> str:
    """A line as it stands in a file."""
    return f"{_prefix(rank, unix_s)}{text}\n"


def _prefix(rank: int, unix_s: float) -> str:
    try:
        moment = datetime.fromtimestamp(unix_s, UTC)
    except (ValueError, OverflowError, OSError):  # of a clock that is beside itself
        moment = datetime.fromtimestamp(0, UTC)
    time = moment.isoformat(timespec="milliseconds")[:-6]
    return f"{time}Z [rank {rank}] "


def parsed(raw: bytes, rank: int, attempt: int) -> Line:
    """A line of a file, without its end. One that was torn by a full disk comes as it is, without a time."""
    text = raw.decode(errors="replace")
    if match := _LINE.fullmatch(text):
        with suppress(ValueError):
            unix_s = datetime.fromisoformat(f"{match[1]}+00:00").timestamp()
            return Line(int(match[2]), attempt, unix_s, match[3])
    return Line(rank, attempt, 0.0, text)


class RankLog:
    """Writes the log of one rank in one attempt; never fails: what a full disk refuses is counted, and noted later.

    Not for several threads at once. Two writers of one rank and attempt write to segments of their own.

    Attributes:
        lost_lines: that could not be written, so far.
        problem: why the last write failed; empty: it did not.
    """

    def __init__(
        self, folder: Path, rank: int, attempt: int, *, segment_bytes: int = SEGMENT_BYTES, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self._folder, self._rank, self._attempt = rank_folder(folder, rank), rank, attempt
        self._segment_bytes, self._kept_bytes = min(segment_bytes, kept_bytes), kept_bytes
        self._descriptor = -1
        self._size = 0
        self._is_torn = False
        self._unsaid = 0
        self.lost_lines = 0
        self.problem = ""

    def write(self, lines: Sequence[str], unix_s: float) -> None:
        """Append lines; what cannot be written is counted."""
        prefix = _prefix(self._rank, unix_s)
        texts = [f"{prefix}{text}\n" for text in lines]
        if self._unsaid:
            note = f"[phalanx: {self._unsaid} lines could not be written: {self.problem}]"
            texts.insert(0, f"{prefix}{note}\n")
        try:
            self._append(texts)
            self.problem, self._unsaid = "", 0
        except OSError as error:
            self.problem = error.strerror or str(error)
            self.lost_lines += len(lines)
            self._unsaid += len(lines)

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
        _prune(self._folder, self._kept_bytes - self._segment_bytes)
        numbers = [segment.number for segment in segments(self._folder) if segment.attempt == self._attempt]
        number = max(numbers, default=0)
        while self._descriptor < 0:
            number += 1
            path = self._folder / f"attempt-{self._attempt:04d}.{number:04d}.log"
            with suppress(FileExistsError):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(path, flags, 0o644)
        self._size, self._is_torn = 0, False


def _prune(folder: Path, most_bytes: int) -> None:
    """Remove the oldest segments until all together have `most_bytes` at most."""
    found = [(segment.path, _size_of(segment.path)) for segment in segments(folder)]
    total = sum(size for _, size in found)
    for path, size in found:
        if total <= most_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
