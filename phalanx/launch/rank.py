"""What happens in the process of a rank, forked or new: it is set up, runs its target, and says how that ended."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from phalanx.core.processes import die_with_parent, name_process
from phalanx.core.signals import STOP_SIGNALS
from phalanx.launch.cores import bind
from phalanx.launch.failures import failure_of_exception
from phalanx.launch.messages import RankSpec, Returned


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
