"""Processes of ranks as a template holds them: forked or new, waited for, heard and ended."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from phalanx.launch.messages import RankSpec
from phalanx.launch.rank import become_rank


@dataclass
class Child:
    """One rank's process, and the end of the pipe on which it says how it ended."""

    rank: int
    pid: int
    words: Connection
    ask: Callable[[], int | None]
    pidfd: int | None = None
    code: int | None = None

    def __post_init__(self) -> None:
        self.pidfd = _pidfd(self.pid)

    def poll(self) -> int | None:
        """Its code once it has ended, as subprocess has it; reaps it, once."""
        if self.code is None:
            self.code = self.ask()
        return self.code

    def peek(self) -> int | None:
        """Its code once it has ended; it stays to be reaped, so that its number is nobody else's until then."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def signal(self, number: int) -> None:
        """Send it a signal, if it has not been reaped."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def sources(self) -> list[Any]:
        """What there is to wait for."""
        return [source for source in (self.words, self.pidfd) if source is not None and not is_closed(source)]

    def pass_words_on(self, send: Callable[[Any], None]) -> None:
        """Send on what it has said so far."""
        try:
            while not self.words.closed and self.words.poll():
                send(self.words.recv())
        except (EOFError, OSError, pickle.UnpicklingError):  # the rank closed it, or was killed while it wrote
            self.words.close()

    def close(self) -> None:
        """Let go of the descriptors."""
        self.words.close()
        if self.pidfd is not None:
            os.close(self.pidfd)


def fork_child(spec: RankSpec, begin_ns: int, foreign: Sequence[int], *, own_session: bool = False) -> Child:
    """A rank that is a copy of this process, without the descriptors `foreign`."""
    words, theirs = Pipe(duplex=False)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            for descriptor in (words.fileno(), *foreign):
                os.close(descriptor)
            if own_session:
                os.setsid()
            become_rank(spec, theirs, parent, "fork", begin_ns)
        finally:
            os._exit(1)  # whatever happens, the frames of the template are not for this process
    theirs.close()

    def ask() -> int | None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None

    return Child(spec.worker.rank, pid, words, ask)


def execute_child(spec: RankSpec, begin_ns: int, *, own_session: bool = False) -> Child:
    """A rank that is a new Python; it reads what it is from a file that has no name."""
    words, theirs = Pipe(duplex=False)
    with tempfile.TemporaryFile() as file:
        pickle.dump((spec, os.getpid(), begin_ns), file)
        file.seek(0)
        program = f"import sys; sys.path[:] = {list(spec.path)!r}; from phalanx.launch.children import new_rank"
        process = subprocess.Popen(
            [sys.executable, "-c", f"{program}; new_rank({file.fileno()}, {theirs.fileno()})"],
            env=dict(spec.environ),
            pass_fds=[file.fileno(), theirs.fileno(), *descriptors_of(spec)],
            start_new_session=own_session,
        )
    theirs.close()
    return Child(spec.worker.rank, process.pid, words, process.poll)


def new_rank(spec_fd: int, words_fd: int) -> None:
    """Become the rank that the template wrote down; the first thing that its new Python does."""
    with os.fdopen(spec_fd, "rb") as file:
        spec, parent, begin_ns = pickle.load(file)
    become_rank(spec, Connection(words_fd, readable=False), parent, "exec", begin_ns)


def descriptors_of(spec: RankSpec) -> list[int]:
    """Those that only this rank uses."""
    return [descriptor for descriptor in (spec.output_fd, spec.worker.listen_fd) if descriptor is not None]


def held_for(children: Iterable[Child]) -> list[int]:
    """Descriptors through which the template knows of its children."""
    held = [(None if child.words.closed else child.words.fileno(), child.pidfd) for child in children]
    return [descriptor for pair in held for descriptor in pair if descriptor is not None]


def is_closed(source: Any) -> bool:
    """Whether a connection has been closed on this side."""
    return isinstance(source, Connection) and source.closed


def _pidfd(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended; None where the system has none such."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None
