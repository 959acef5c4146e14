"""The template process: imports everything once and forks the ranks, so that N ranks do not import torch N times.

It must hold one thread only and touch no device, or the forked ranks could not work; where that cannot be had, each
rank is a new Python instead, which imports for itself. The template waits for the ranks, reports how they end, and
passes signals on, so the launcher needs to know nothing of how they were made. When the launcher is gone, so are they.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from phalanx.core.processes import die_with_parent, name_process, why_not_fork
from phalanx.launch.failures import failure_of_exception
from phalanx.launch.messages import Broken, Exited, RankSpec, Ready, Send
from phalanx.launch.rank import become_rank

# Where the system has no descriptors of processes, it is asked this often whether one has ended.
_POLL_S = 0.02


@dataclass
class _Child:
    """One rank's process, and the end of the pipe on which it says how it ended."""

    rank: int
    pid: int
    words: Connection
    ask: Callable[[], int | None]
    pidfd: int | None = None
    code: int | None = None

    def poll(self) -> int | None:
        """Its code once it has ended, as subprocess has it; reaps it, once."""
        if self.code is None:
            self.code = self.ask()
        return self.code


def serve(launcher_fd: int, launcher: int) -> None:
    """Serve the process `launcher`, at the other end of the socket `launcher_fd`, until it hangs up."""
    die_with_parent(launcher)
    name_process("phalanx template")
    connection = Connection(launcher_fd)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        modules = connection.recv()
        try:
            _import_all(modules)
        except BaseException as error:
            connection.send(Broken(failure_of_exception(0, time.monotonic_ns(), error)))
            return
        refused = why_not_fork(sys.modules)
        connection.send(Ready(refused))
        specs, may_fork = connection.recv()
        _run(connection, specs, fork=may_fork and refused is None)


def _import_all(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would else write to, and so copy, every page with an object on it


def _run(connection: Connection, specs: Sequence[RankSpec], *, fork: bool) -> None:
    children: dict[int, _Child] = {}
    begin_ns = time.monotonic_ns()
    try:
        for spec in specs:
            if fork:
                theirs = [descriptor for other in specs if other is not spec for descriptor in _descriptors(other)]
                child = _fork(spec, begin_ns, [connection.fileno(), *theirs, *_held(children.values())])
            else:
                child = _execute(spec, begin_ns)
            child.pidfd = _pidfd(child.pid)
            children[child.rank] = child
        for spec in specs:  # an end is seen by others only when nobody else holds it open
            for descriptor in _descriptors(spec):
                os.close(descriptor)
        _look_after(connection, dict(children))
    finally:
        _signal(children, list(children), signal.SIGKILL)


def _fork(spec: RankSpec, begin_ns: int, foreign: Sequence[int]) -> _Child:
    """A rank that is a copy of this process, without the descriptors `foreign`."""
    words, theirs = Pipe(duplex=False)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            for descriptor in (words.fileno(), *foreign):
                os.close(descriptor)
            become_rank(spec, theirs, parent, "fork", begin_ns)
        finally:
            os._exit(1)  # whatever happens, the frames of the template are not for this process
    theirs.close()

    def ask() -> int | None:
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None

    return _Child(spec.worker.rank, pid, words, ask)


def _execute(spec: RankSpec, begin_ns: int) -> _Child:
    """A rank that is a new Python; it reads what it is from a file that has no name."""
    words, theirs = Pipe(duplex=False)
    with tempfile.TemporaryFile() as file:
        pickle.dump((spec, os.getpid(), begin_ns), file)
        file.seek(0)
        program = f"import sys; sys.path[:] = {list(spec.path)!r}; from phalanx.launch.template import new_rank"
        process = subprocess.Popen(
            [sys.executable, "-c", f"{program}; new_rank({file.fileno()}, {theirs.fileno()})"],
            env=dict(spec.environ),
            pass_fds=[file.fileno(), theirs.fileno(), *_descriptors(spec)],
        )
    theirs.close()
    return _Child(spec.worker.rank, process.pid, words, process.poll)


def new_rank(spec_fd: int, words_fd: int) -> None:
    """Become the rank that the template wrote down; the first thing that its new Python does."""
    with os.fdopen(spec_fd, "rb") as file:
        spec, parent, begin_ns = pickle.load(file)
    become_rank(spec, Connection(words_fd, readable=False), parent, "exec", begin_ns)


def _descriptors(spec: RankSpec) -> list[int]:
    """Those that only this rank uses."""
    return [descriptor for descriptor in (spec.output_fd, spec.worker.listen_fd) if descriptor is not None]


def _look_after(connection: Connection, children: dict[int, _Child]) -> None:
    """Pass on signals, words and ends until all ranks are gone; raises EOFError when the launcher is."""
    while children:
        sources: list[Any] = [connection]
        for child in children.values():
            sources += [source for source in (child.words, child.pidfd) if source is not None and not _closed(source)]
        polled = any(child.pidfd is None for child in children.values())
        ready = wait(sources, _POLL_S if polled else None)
        if connection in ready:
            message = connection.recv()
            assert isinstance(message, Send)
            _signal(children, message.ranks, message.signal)
        for child in list(children.values()):
            _pass_words_on(child, connection)
            if (child.pidfd is None or child.pidfd in ready) and (code := child.poll()) is not None:
                del children[child.rank]
                _pass_words_on(child, connection)  # the last ones, written before it ended
                connection.send(Exited(child.rank, time.monotonic_ns(), code))
                _close(child)


def _held(children: Iterable[_Child]) -> list[int]:
    """Descriptors through which the template knows of its children."""
    held = [(child.words.fileno(), child.pidfd) for child in children]
    return [descriptor for pair in held for descriptor in pair if descriptor is not None]


def _pass_words_on(child: _Child, connection: Connection) -> None:
    try:
        while not child.words.closed and child.words.poll():
            connection.send(child.words.recv())
    except (EOFError, OSError, pickle.UnpicklingError):  # the rank closed it, or was killed while it wrote
        child.words.close()


def _signal(children: dict[int, _Child], ranks: Sequence[int], number: int) -> None:
    for rank in ranks:
        if rank in children and children[rank].poll() is None:
            os.kill(children[rank].pid, number)


def _closed(source: Any) -> bool:
    return isinstance(source, Connection) and source.closed


def _close(child: _Child) -> None:
    child.words.close()
    if child.pidfd is not None:
        os.close(child.pidfd)


def _pidfd(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended; None where the system has none such."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None
