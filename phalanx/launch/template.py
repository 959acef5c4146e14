"""What happens in the process of a rank, forked or new: it is set up, runs its target, and says how that ended.

Processes of ranks as a template holds them: forked or new, waited for, heard and ended.

The template process: imports everything once and forks the ranks, so that N ranks do not import torch N times.

It must hold one thread only and touch no device, or the forked ranks could not work; where that cannot be had, each
rank is a new Python instead, which imports for itself. The template waits for the ranks, reports how they end, and
passes signals on, so the launcher needs to know nothing of how they were made. When the launcher is gone, so are they.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from phalanx.ipc.processes import STOP_SIGNALS, die_with_parent, name_process, why_not_fork
from phalanx.launch.cores import bind
from phalanx.launch.launch_messages import Broken, Exited, RankSpec, Ready, Returned, Send
from phalanx.launch.rank_failures import failure_of_exception


def become_rank(spec: RankSpec, words: Connection, parent: int, phase: str, phase_began_ns: int) -> NoReturn:
    """Turn this process into a rank, run its target, and end it.

    Args:
        spec: what rank.
        words: where to say how it ended, before the process is gone.
        parent: the process that it shall not outlive.
        phase: how it was made, ``fork`` or ``exec``, a phase of its start-up.
        phase_began_ns: when that began, on the monotonic clock.
    """
    status = 1
    try:
        die_with_parent(parent)
        worker = spec.worker.with_phase(phase, (time.monotonic_ns() - phase_began_ns) * 1e-9)
        begin_ns = time.monotonic_ns()
        _set_up(spec)
        function = load_target(spec.target)
        worker = worker.with_phase("setup", (time.monotonic_ns() - begin_ns) * 1e-9)
        if worker.launcher == "phalanx":
            os.environ.update(worker.to_environment())
        own = (words.send,) if spec.speaks else ()
        status = _status(function(worker, *own, *spec.arguments))
        words.send(_returned(worker.rank, status))
    except SystemExit as stop:
        status = _status(stop.code)
        words.send(_returned(spec.worker.rank, status))
    except BaseException as error:
        failure = failure_of_exception(spec.worker.rank, time.monotonic_ns(), error)
        status = failure.status
        words.send(failure)
    finally:
        _leave(status)


def load_target(target: str) -> Callable[..., Any]:
    """The function that ``module:function`` names."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    assert callable(function)
    return function  # type: ignore[no-any-return]


def _set_up(spec: RankSpec) -> None:
    """What a new Python would have of its own: descriptors, environment, signals, cores, threads and random numbers."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a rank is in the background of its terminal, and may write to it
    _set_output(spec.output_fd)
    os.environ.clear()
    os.environ.update(spec.environ)
    sys.path[:] = spec.path
    sys.argv[:] = spec.argv
    name_process(f"phalanx rank {spec.worker.rank}")
    faulthandler.enable()
    bind(spec.share)
    _set_libraries(spec.share.threads)


def _set_output(output_fd: int | None) -> None:
    if output_fd is None:
        return
    for descriptor in (1, 2):
        os.dup2(output_fd, descriptor)
    os.close(output_fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _set_libraries(threads: int) -> None:
    """Threads; and generators of random numbers that differ, as those of new processes do."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)
        torch.default_generator.seed()


def _status(result: Any) -> int:
    """Exit status of what a target returned, or of SystemExit's code, which may be text that is to be shown."""
    if result is None or isinstance(result, int):
        return int(result or 0) & 0xFF
    print(result, file=sys.stderr)
    return 1


def _returned(rank: int, status: int) -> Returned:
    """With the threads for which `_leave` waits."""
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    return Returned(rank, status, tuple(thread.name for thread in others if not thread.daemon) if status == 0 else ())


def _leave(status: int) -> NoReturn:
    """End as Python does, but run nothing that belongs to the template: neither its frames nor its destructors.

    Private functions of Python, which multiprocessing's own children call at their end too.
    """
    with contextlib.suppress(BaseException):
        if status == 0:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(status)


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
        program = f"import sys; sys.path[:] = {list(spec.path)!r}; from phalanx.launch.template import new_rank"
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
