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
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from phalanx.core.processes import die_with_parent, name_process, why_not_fork
from phalanx.launch.children import Child, descriptors_of, execute_child, fork_child, held_for
from phalanx.launch.failures import failure_of_exception
from phalanx.launch.messages import Broken, Exited, RankSpec, Ready, Send

POLL_S = 0.02
"""Where the system has no descriptors of processes, it is asked this often whether one has ended, seconds."""


def serve(launcher_fd: int, launcher: int) -> None:
    """Serve the process `launcher`, at the other end of the socket `launcher_fd`, until it hangs up."""
    die_with_parent(launcher)
    name_process("phalanx template")
    connection = Connection(launcher_fd)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        modules = connection.recv()
        try:
            import_all(modules)
        except BaseException as error:
            connection.send(Broken(failure_of_exception(0, time.monotonic_ns(), error)))
            return
        refused = why_not_fork(sys.modules)
        connection.send(Ready(refused))
        specs, may_fork = connection.recv()
        _run(connection, specs, fork=may_fork and refused is None)


def import_all(modules: Sequence[str]) -> None:
    """Import `modules`, and keep what they made out of the garbage collector's way.

    Raises:
        BaseException: what an import raised.
    """
    with without_collections():
        for name in modules:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would else write to, and so copy, every page with an object on it


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """For imports: what they make stays, and looking through it for garbage again and again is an eighth of torch's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _run(connection: Connection, specs: Sequence[RankSpec], *, fork: bool) -> None:
    children: dict[int, Child] = {}
    begin_ns = time.monotonic_ns()
    try:
        for spec in specs:
            if fork:
                theirs = [descriptor for other in specs if other is not spec for descriptor in descriptors_of(other)]
                child = fork_child(spec, begin_ns, [connection.fileno(), *theirs, *held_for(children.values())])
            else:
                child = execute_child(spec, begin_ns)
            children[child.rank] = child
        for spec in specs:  # an end is seen by others only when nobody else holds it open
            for descriptor in descriptors_of(spec):
                os.close(descriptor)
        _look_after(connection, dict(children))
    finally:
        for child in children.values():
            child.signal(signal.SIGKILL)


def _look_after(connection: Connection, children: dict[int, Child]) -> None:
    """Pass on signals, words and ends until all ranks are gone; raises EOFError when the launcher is."""
    while children:
        sources: list[Any] = [connection, *(source for child in children.values() for source in child.sources())]
        polled = any(child.pidfd is None for child in children.values())
        ready = wait(sources, POLL_S if polled else None)
        if connection in ready:
            message = connection.recv()
            assert isinstance(message, Send)
            for rank in message.ranks:
                if rank in children:
                    children[rank].signal(message.signal)
        for child in list(children.values()):
            child.pass_words_on(connection.send)
            if (child.pidfd is None or child.pidfd in ready) and (code := child.poll()) is not None:
                del children[child.rank]
                child.pass_words_on(connection.send)  # the last ones, written before it ended
                connection.send(Exited(child.rank, time.monotonic_ns(), code))
                child.close()
