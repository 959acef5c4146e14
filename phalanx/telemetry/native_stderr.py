"""A rank's log gets what native code writes to stderr: C++ warnings, NCCL's lines, the last words before an abort.

    fd 2 ── pipe ──► stderr_relay.py ──► where stderr went before
                            └──────────► the rank's log
    sys.stderr ────────────────────────► where stderr went before (a live display needs its terminal)

The relay outlives a crash of the rank and reads what is left. Should the relay itself be killed, fd 2 goes back to
where it went. Nothing is done where Python's stderr is not fd 2 (a notebook, a test that captures it) or where another
program keeps the output anyway (`phalanx run`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from phalanx.core.progress import PROGRESS_VARIABLE

_STDOUT, _STDERR = 1, 2
_REST_S = 0.5  # how long the relay may take for the rest; a process that was left behind may hold its pipe for longer


@contextmanager
def native_stderr_copied(path: Path, who: str, file_bytes: int) -> Iterator[None]:
    """For the block, the log at `path` gets what is written to fd 2, each line under `who`; so does the terminal."""
    redirected = None
    if _is_plain() and PROGRESS_VARIABLE not in os.environ:
        with suppress(OSError):  # without descriptors or processes left, stderr stays as it is
            redirected = _Redirected(path, who, file_bytes)
    try:
        yield
    finally:
        if redirected is not None:
            redirected.close()


def _is_plain() -> bool:
    """Whether what Python writes to stderr goes to fd 2."""
    try:
        return sys.stderr.fileno() == _STDERR
    except (AttributeError, OSError, ValueError):
        return False


class _Redirected:
    """Fd 2 as the pipe of a relay, and Python's stderr past it."""

    def __init__(self, path: Path, who: str, file_bytes: int) -> None:
        self._lock = threading.Lock()
        self._is_over = False
        sys.stderr.flush()
        self._shown = fcntl.fcntl(_STDERR, fcntl.F_DUPFD_CLOEXEC, 3)
        try:
            self._relay = self._start(path, who, file_bytes)
        except OSError:
            os.close(self._shown)
            raise
        self._former: Any = sys.stderr
        self._direct: TextIO = os.fdopen(
            fcntl.fcntl(self._shown, fcntl.F_DUPFD_CLOEXEC, 3),
            "w",
            buffering=1,
            encoding=sys.stderr.encoding,
            errors=sys.stderr.errors,
        )
        sys.stderr = self._direct
        _move_handlers(self._former, self._direct)
        self._moved_nccl = _move_nccl(self._shown)
        threading.Thread(target=self._watch, name="stderr relay", daemon=True).start()

    def _start(self, path: Path, who: str, file_bytes: int) -> subprocess.Popen[bytes]:
        source, sink = os.pipe()
        try:
            relay = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("stderr_relay.py")),
                 str(path.absolute()), who, str(file_bytes)],
                stdin=source, stdout=self._shown, stderr=subprocess.DEVNULL, cwd="/",
                start_new_session=True,  # what ends the group of the rank does not end it before it has read the rest
            )  # fmt: skip
            os.dup2(sink, _STDERR)
        finally:
            os.close(source)
            os.close(sink)
        return relay

    def _watch(self) -> None:
        """Where the relay ends before its time, nobody would read the pipe."""
        self._relay.wait()
        with self._lock:
            if not self._is_over:
                os.dup2(self._shown, _STDERR)

    def close(self) -> None:
        """Put everything back, and let the relay read the rest."""
        with self._lock:
            self._is_over = True
            os.dup2(self._shown, _STDERR)
        if sys.stderr is self._direct:
            sys.stderr = self._former
        _move_handlers(self._direct, self._former)
        if self._moved_nccl:
            os.environ.pop("NCCL_DEBUG_FILE", None)
        with suppress(OSError, ValueError):
            self._direct.close()
        os.close(self._shown)
        with suppress(subprocess.TimeoutExpired):
            self._relay.wait(_REST_S)


def _move_nccl(shown: int) -> bool:
    """NCCL writes to stdout unless told otherwise: where that is the same terminal, it may as well be stderr."""
    if "NCCL_DEBUG" not in os.environ or "NCCL_DEBUG_FILE" in os.environ:
        return False
    try:
        here, there = os.fstat(_STDOUT), os.fstat(shown)
    except OSError:
        return False
    if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
        return False
    os.environ["NCCL_DEBUG_FILE"] = "/dev/stderr"
    return True


def _move_handlers(former: Any, stream: Any) -> None:
    """Handlers of `logging` that libraries made at import hold the stream itself."""
    for logger in [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is former:
                handler.setStream(stream)
