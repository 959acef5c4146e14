"""The log file of a rank: ``RUN/logs/train.log``, or ``rank-3.HOST.log`` of several ranks; read by `run_log_lines`.

Each line stands as ``2026-11-25T19:01:02.123Z INFO [rank 0 start 3] text``. A text of several lines becomes several
such lines. A file that is full becomes ``train.log.1``, that one ``train.log.2``, and the oldest goes. Later starts of
a run append. Lines are handed to the system at once: a killed process loses none.

Logging never fails: what a full disk refuses is counted, and the count written when there is room again.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from phalanx.telemetry.config import LoggingConfig
from phalanx.telemetry.native_stderr import native_stderr_copied

FOLDER = "logs"
ALONE = "train.log"
STARTED, ENDED = "started: ", "ended: "
"""What the first line of a start begins with, and the last one where the process could still say how it ended."""

_PARTIAL_CHARS = 16 << 10
"""A line without an end is cut there: progress bars that never end one are kept by their last state."""


def log_path(run: Path, rank: int, world_size: int, host: str) -> Path:
    """Where a rank writes; host names keep letters, digits, ``_`` and ``-``."""
    name = ALONE if world_size == 1 else f"rank-{rank}.{re.sub(r'[^A-Za-z0-9_-]', '_', host)}.log"
    return run / FOLDER / name


class RunLog(logging.Handler):
    """Writes the log of one rank; a handler of `logging`, too, for its lock, which outlives forks.

    Args:
        start: how many times the run has been started, with this one; stands on every line.

    Attributes:
        who: what stands on every line after its level.
        problem: why the last write failed; empty: it did not.
    """

    def __init__(self, path: Path, rank: int, start: int, *, file_bytes: int, files: int) -> None:
        super().__init__()
        self._path, self.who = path, f"[rank {rank} start {start}]"
        self._file_bytes, self._files = file_bytes, files
        self._descriptor, self._is_torn, self._lost_lines = -1, False, 0
        self._partial = ""
        self._shows_crashes = False
        self.problem = ""

    def note(self, text: str, level: str = "INFO") -> None:
        """Append `text`, a line of the file for each of its own."""
        self._append(level, text.splitlines() or [""])

    def error(self, error: BaseException, text: str = "") -> None:
        """Append a traceback, and below it `text`."""
        lines = "".join(traceback.format_exception(error)).splitlines()
        self._append("ERROR", [*lines, *text.splitlines()])

    def emit(self, record: logging.LogRecord) -> None:
        """Append a record of `logging`."""
        text = f"{record.name}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info))
        self._append(record.levelname, text.splitlines())

    def feed(self, text: str) -> None:
        """Append what was written to stderr, once its line has ended; of one that is drawn over, the last state."""
        self.acquire()
        try:
            *lines, rest = (self._partial + text).split("\n")
            self._partial = rest.rpartition("\r")[2][-_PARTIAL_CHARS:] if rest[-1:] != "\r" else rest[-_PARTIAL_CHARS:]
            if lines:
                self._append("STDERR", [line.rstrip("\r").rpartition("\r")[2] for line in lines])
        finally:
            self.release()

    def show_crashes(self) -> None:
        """Have Python write here where a crash in native code happened, unless it writes that elsewhere already."""
        self._shows_crashes = not faulthandler.is_enabled()
        self._point_crashes()

    def close(self) -> None:
        """Write what has no end yet, and close the file; a second time does nothing."""
        self.acquire()
        try:
            if self._partial:
                self.feed("\n")
            if self._shows_crashes:
                faulthandler.disable()
                self._shows_crashes = False
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
        finally:
            self.release()
        super().close()

    def _append(self, level: str, lines: list[str]) -> None:
        prefix = f"{datetime.now(UTC).isoformat(timespec='milliseconds')[:-6]}Z"
        texts = [f"{prefix} {level} {self.who} {line}\n" for line in lines]
        self.acquire()
        try:
            if self._lost_lines:
                told = f"{self._lost_lines} lines could not be written: {self.problem}"
                texts.insert(0, f"{prefix} WARNING {self.who} {told}\n")
            self._write("".join(texts).encode(errors="replace"))
            self.problem, self._lost_lines = "", 0
        except OSError as error:
            self.problem = error.strerror or str(error)
            self._lost_lines += len(lines)
        finally:
            self.release()

    def _write(self, block: bytes) -> None:
        if self._descriptor < 0:
            self._open()
        elif (size := os.fstat(self._descriptor).st_size) and size + len(block) > self._file_bytes:
            self._rotate()  # by what is there: a relay of stderr appends, too
        if self._is_torn:
            block = b"\n" + block
        self._is_torn = True
        while block:  # a disk that fills up takes part of a line, then refuses the rest
            written = os.write(self._descriptor, block)
            block = block[written:]
        self._is_torn = False

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o644)
        former, self._descriptor = self._descriptor, descriptor
        size = os.fstat(descriptor).st_size
        self._is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        self._point_crashes()
        if former >= 0:
            os.close(former)

    def _rotate(self) -> None:
        """The file becomes the newest of the older ones; where that is refused, it is written on."""
        places = [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, self._files))]
        with suppress(OSError):
            places[-1].unlink(missing_ok=True)
            for older, newer in zip(places[:0:-1], places[-2::-1], strict=True):
                with suppress(FileNotFoundError):
                    newer.rename(older)
        self._open()

    def _point_crashes(self) -> None:
        if self._shows_crashes and self._descriptor >= 0:
            faulthandler.enable(self._descriptor)


class _Copied:
    """A stream, of which a log gets a copy; all but writing is left to the stream."""

    def __init__(self, stream: Any, log: RunLog) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> Any:
        """See `io.TextIOBase.write`."""
        self._log.feed(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        """See `io.IOBase.writelines`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def copy_stderr(log: RunLog) -> None:
    """From now on `log` gets what Python writes to `sys.stderr`; done again where another one has taken its place."""
    if sys.stderr is not None and not isinstance(sys.stderr, _Copied):
        sys.stderr = _Copied(sys.stderr, log)


@contextmanager
def _stderr_copied(log: RunLog) -> Iterator[None]:
    """Copy what Python writes to stderr, by handlers too that libraries made at import and that hold the stream."""
    former = sys.stderr
    copy_stderr(log)
    copied: Any = sys.stderr
    handlers = [handler for handler in _stream_handlers() if handler.stream is former and copied is not former]
    for handler in handlers:
        handler.setStream(copied)
    try:
        yield
    finally:
        if sys.stderr is copied:
            sys.stderr = former
        for handler in handlers:
            if handler.stream is copied:
                handler.setStream(former)


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            yield from (handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler))


@contextmanager
def open_log(config: LoggingConfig, path: Path, rank: int, start: int, begins: str) -> Iterator[RunLog | None]:
    """Log into a file as long as the block lasts, with its errors and what is written to stderr; None: none is wanted.

    What native code writes to stderr comes by a process of its own (`native_stderr`), which outlives a crash.

    Args:
        begins: said of this start in its first line.
    """
    if not config.file_bytes:
        yield None
        return
    log = RunLog(path, rank, start, file_bytes=config.file_bytes, files=config.files)
    try:
        with native_stderr_copied(path, log.who, config.file_bytes), _stderr_copied(log):
            log.note(STARTED + begins)
            log.show_crashes()
            yield log
    finally:
        log.close()
