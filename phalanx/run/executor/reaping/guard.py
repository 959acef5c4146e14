"""A process above the executor that ends what the executor leaves behind, however that ends. Linux, torch-free.

    guard ── forks ──► executor ── starts ──► template ── forks ──► ranks

It has nothing to do but to wait. Where a PID namespace holds the processes, the executor is its init and the kernel
does the guard's work.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from phalanx.core.processes import name_process
from phalanx.core.signals import STOP_SIGNALS
from phalanx.run.executor.reaping.kernel import become_subreaper, die_with, mount_own_proc, unshare_pids

_FORWARDED = (*STOP_SIGNALS, signal.SIGHUP)


def run_below(serve: Callable[[], int], after: Callable[[], None], *, in_namespace: bool) -> int:
    """Run ``serve()`` in a new process, wait until it has ended, then call ``after()`` here.

    Signals that mean "stop soon" are passed on to that process, which is in a process group of its own, so that one
    from a terminal reaches it once. It dies with this process.

    Args:
        serve: its exit status.
        in_namespace: make the new process the init of a PID namespace.

    Returns:
        The exit status of the new process; 128 and the number of the signal that killed it.

    Raises:
        OSError: the kernel refuses what is needed, before anything was started.
    """
    become_subreaper()
    if in_namespace:
        unshare_pids()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    parent = 0 if in_namespace else os.getpid()
    child = os.fork()
    if child == 0:
        _be_executor(serve, parent, before, in_namespace)
    handlers = {number: signal.signal(number, lambda number, _: _pass_on(child, number)) for number in _FORWARDED}
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        after()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _be_executor(serve: Callable[[], int], parent: int, mask: set[int | signal.Signals], in_namespace: bool) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        die_with(parent)
        if in_namespace:
            mount_own_proc()
        become_subreaper()
        name_process("phalanx executor")
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = serve()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(status)  # the frames above are the guard's


def _pass_on(child: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, number)
