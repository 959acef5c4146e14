"""The process of a rank: forked or a new Python, what happens in it, and the template's handle on it."""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from phalanx.ipc.processes import die_with_parent, dump_signal, name_process
from phalanx.ipc.stop_request import STOP_SIGNALS
from phalanx.launch import fresh_rank
from phalanx.launch.cores import bind
from phalanx.launch.launch_messages import RankSpec, Returned
from phalanx.launch.rank_failures import EndedWithPeer, Failure, failure_of_exception
from phalanx.launch.script_hooks import begin_page

_LAST_S = 1e6  # of a thread, before another takes its turn: for ever


def become_rank(spec: RankSpec, reports: Connection, parent: int, phase: str, phase_began_ns: int) -> NoReturn:
    """Turn this process into a rank that does not outlive `parent`, run its target, report how it ended, and end it.

    How it was made, ``fork`` or ``exec``, is a phase of its start-up, which began at `phase_began_ns`.
    """
    status, before, is_interrupted, process = 1, dict(sys.modules), False, os.getpid()
    try:
        die_with_parent(parent)
        worker = spec.worker.with_phase(phase, (time.monotonic_ns() - phase_began_ns) * 1e-9)
        begin_ns = time.monotonic_ns()
        _set_up(spec)
        function = load_target(spec.target)
        worker = worker.with_phase("setup", (time.monotonic_ns() - begin_ns) * 1e-9)
        if worker.launcher == "phalanx":
            os.environ.update(worker.to_environment())
        send = (reports.send,) if spec.speaks else ()
        status = _status(function(worker, *send, *spec.arguments))
        if os.getpid() == process:  # not one that it has forked, and that ends as it would
            reports.send(_returned(worker.rank, status))
    except BaseException as error:
        told = _told(spec.worker.rank, error)
        status, is_interrupted = told.status, isinstance(error, KeyboardInterrupt)
        if isinstance(error, SystemExit) and not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        if os.getpid() == process:
            reports.send(told)
    finally:
        _leave(status, before if spec.fresh else None, is_interrupted=is_interrupted)


def report_end(reports_fd: int, rank: int, error: BaseException | None) -> None:
    """Tell the template how the script of a new Python has ended: by `error`, or None, at the end of its lines."""
    with contextlib.suppress(OSError), contextlib.closing(Connection(reports_fd, readable=False)) as reports:
        reports.send(_returned(rank, 0) if error is None else _told(rank, error))


def _told(rank: int, error: BaseException) -> Failure | Returned:
    """What is reported of an end by an exception."""
    if isinstance(error, EndedWithPeer):
        return error.failure
    if isinstance(error, SystemExit):
        return _returned(rank, _status(error.code))
    return failure_of_exception(rank, time.monotonic_ns(), error)


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
    if spec.output_fd is not None:
        for descriptor in (1, 2):
            os.dup2(spec.output_fd, descriptor)
        os.close(spec.output_fd)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(spec.environ)
    sys.path[:] = spec.path
    sys.argv[:] = spec.argv
    name_process(f"phalanx rank {spec.worker.rank}")
    faulthandler.enable()
    bind(spec.share)
    # Generators of random numbers differ, as those of new processes do.
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(spec.share.threads)
        torch.default_generator.seed()


def _status(result: Any) -> int:
    """Exit status of what a target returned, or of SystemExit's code, which may be text."""
    return int(result or 0) & 0xFF if result is None or isinstance(result, int) else 1


def _returned(rank: int, status: int) -> Returned:
    """With the threads for which `_leave` waits."""
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    kept_by = tuple(thread.name for thread in others if not thread.daemon)
    return Returned(rank, status, kept_by, time.monotonic_ns())


def _leave(status: int, before: Mapping[str, ModuleType] | None, *, is_interrupted: bool) -> NoReturn:
    """End as Python does, but run nothing that belongs to the template: neither its frames nor its destructors.

    Private functions of Python, which multiprocessing's own children call at their end too.

    Args:
        before: of a script, the modules that were there before it ran; the others end with it.
    """
    with contextlib.suppress(BaseException):
        if status == 0 or before is not None:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    if before is not None:
        with contextlib.suppress(BaseException):
            _end_modules(before)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    if before is not None and is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _end_modules(before: Mapping[str, ModuleType]) -> None:
    """Have the modules that were imported since let go of what they hold, so that files are written to their end.

    As in Python, the script comes first, and each module before those that it has imported. Threads that are daemons,
    which do not live to see that in Python, may not run meanwhile, nor say that they miss something.
    """
    sys.setswitchinterval(_LAST_S)
    threading.excepthook = lambda _: None
    for module in [module for name, module in sys.modules.items() if before.get(name) is not module]:
        names = vars(module) if isinstance(module, ModuleType) else {}
        for is_private in (True, False):
            for name in [name for name in names if (name[:1] == "_" and name[1:2] != "_") is is_private]:
                if name != "__builtins__":
                    names[name] = None
    gc.collect()


@dataclass
class RankProcess:
    """One rank's process, as the template has it, and the end of the pipe on which it reports how it ended.

    Attributes:
        ask: reaps it, and returns its code, once it has ended.
        pidfd: a descriptor that is readable once it has ended; None where the system has none such.
        code: as subprocess has it, negative for a signal; None: it has not been reaped.
    """

    rank: int
    pid: int
    reports: Connection
    ask: Callable[[], int | None]
    pidfd: int | None = None
    code: int | None = None

    def __post_init__(self) -> None:
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Its code once it has ended; reaps it, once."""
        if self.code is None:
            self.code = self.ask()
        return self.code

    def peek(self) -> int | None:
        """Its code once it has ended; it stays to be reaped, so that no other process has its number until then."""
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
        reports = [] if self.reports.closed else [self.reports]
        return [*reports, *([] if self.pidfd is None else [self.pidfd])]

    def descriptors(self) -> list[int]:
        """Those through which the template knows of it."""
        reports = [] if self.reports.closed else [self.reports.fileno()]
        return [*reports, *([] if self.pidfd is None else [self.pidfd])]

    def forward(self, send: Callable[[Any], None]) -> None:
        """Send on what it has reported so far."""
        try:
            while not self.reports.closed and self.reports.poll():
                send(self.reports.recv())
        except (EOFError, OSError, pickle.UnpicklingError):  # the rank closed it, or was killed while it wrote
            self.reports.close()

    def close(self) -> None:
        """Close the descriptors."""
        self.reports.close()
        if self.pidfd is not None:
            os.close(self.pidfd)


def fork_rank(
    spec: RankSpec,
    begin_ns: int,
    foreign: Iterable[int],
    others: Iterable[RankProcess],
    *,
    own_session: bool = False,
) -> RankProcess:
    """A rank that is a copy of this process, without the descriptors `foreign` and those of `others`."""
    reports, theirs = Pipe(duplex=False)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            for descriptor in (reports.fileno(), *foreign, *(fd for other in others for fd in other.descriptors())):
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

    return RankProcess(spec.worker.rank, pid, reports, ask)


def execute_rank(spec: RankSpec, begin_ns: int, *, own_session: bool = False) -> RankProcess:
    """A rank that is a new Python; it reads what it is from a file that has no name, unless it runs a script."""
    reports, theirs = Pipe(duplex=False)
    if spec.fresh:
        process = _execute_script(spec, theirs.fileno(), own_session=own_session)
        theirs.close()
        return RankProcess(spec.worker.rank, process.pid, reports, process.poll)
    with tempfile.TemporaryFile() as file:
        pickle.dump((spec, os.getpid(), begin_ns), file)
        file.seek(0)
        program = f"import sys; sys.path[:] = {list(spec.path)!r}; from phalanx.launch.rank_process import new_rank"
        process = subprocess.Popen(
            [sys.executable, "-c", f"{program}; new_rank({file.fileno()}, {theirs.fileno()})"],
            env=dict(spec.environ),
            pass_fds=[file.fileno(), theirs.fileno(), *descriptors_of(spec)],
            start_new_session=own_session,
        )
    theirs.close()
    return RankProcess(spec.worker.rank, process.pid, reports, process.poll)


def _execute_script(spec: RankSpec, reports_fd: int, *, own_session: bool) -> subprocess.Popen[bytes]:
    """A new Python that runs a script as if it were given that alone (`phalanx.launch.fresh_rank`)."""
    parent = os.getpid()

    def set_up() -> None:  # of the process, before it becomes a Python: that inherits it
        die_with_parent(parent)
        bind(spec.share)
        begin_page(spec.environ)

    home = Path(fresh_rank.__file__).parents[2]
    words = [fresh_rank.__file__, str(reports_fd), str(dump_signal()), str(home), *spec.fresh]
    return subprocess.Popen(
        [sys.executable, "-u", *words],
        env=dict(spec.environ),
        pass_fds=[reports_fd],
        stdout=spec.output_fd,
        stderr=spec.output_fd,
        start_new_session=own_session,
        preexec_fn=set_up,  # the template has one thread
    )


def new_rank(spec_fd: int, reports_fd: int) -> None:
    """Become the rank that the template wrote down; the first thing that its new Python does."""
    with os.fdopen(spec_fd, "rb") as file:
        spec, parent, begin_ns = pickle.load(file)
    become_rank(spec, Connection(reports_fd, readable=False), parent, "exec", begin_ns)


def descriptors_of(*specs: RankSpec) -> list[int]:
    """Those that only these ranks use."""
    pairs = ((spec.output_fd, spec.worker.listen_fd) for spec in specs)
    return [descriptor for pair in pairs for descriptor in pair if descriptor is not None]


def sources_of(processes: Sequence[RankProcess]) -> tuple[list[Any], float | None]:
    """What to wait for to hear of these processes, and for how long, seconds: without descriptors they are polled."""
    is_polled = any(process.pidfd is None for process in processes)
    return [source for process in processes for source in process.sources()], 0.02 if is_polled else None
