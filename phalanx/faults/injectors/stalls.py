"""Ways in which a process stands still, for a while or for ever. Torch-free."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time

from phalanx.faults.agenda import Order
from phalanx.faults.injectors.base import Act, RefusedError, Surroundings

_MUTEX_BYTES = 64  # no pthread_mutex_t of Linux is larger; one of zeros is unlocked


def sleep(order: Order, around: Surroundings) -> Act:
    """Sleep in the main thread, with the interpreter's lock released."""
    seconds = _seconds(order)

    def act() -> None:
        end_s = time.monotonic() + seconds
        while (rest_s := end_s - time.monotonic()) > 0:
            time.sleep(min(rest_s, 3600))

    return act


def busy_loop(order: Order, around: Surroundings) -> Act:
    """Turn in a loop of Python code in the main thread."""
    seconds = _seconds(order)

    def act() -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            pass

    return act


def deadlock(order: Order, around: Surroundings) -> Act:
    """Wait in C with the interpreter's lock held, so that no thread of Python runs: faulthandler's alone still does.

    For ever: a C mutex is locked twice. No signal handler of Python runs meanwhile, as in a real one.
    """
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the interpreter's lock
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    seconds = order.seconds

    def act() -> None:
        if seconds is None:
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)
        else:
            library.usleep(int(seconds * 1e6))

    return act


def pause(order: Order, around: Surroundings) -> Act:
    """SIGSTOP; for a while only if its length is given, after which a process of its own sends SIGCONT."""
    seconds = order.seconds
    if order.unit in ("calls", "steps"):
        raise RefusedError(f"lasts.unit = {order.unit!r}: a stopped process counts none, give seconds or forever")

    def act() -> None:
        if seconds is not None:
            around.kept.append(subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]))
        os.kill(os.getpid(), signal.SIGSTOP)

    return act


def _seconds(order: Order) -> float:
    if order.unit in ("calls", "steps"):
        raise RefusedError(f"lasts.unit = {order.unit!r}: no step ends meanwhile, give seconds or forever")
    return float("inf") if order.seconds is None else order.seconds
