"""Children of this process, signals that cannot hit a wrong one, and waiting for ends. Linux, torch-free."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from phalanx.core.kernel_files import PROC, read_text
from phalanx.core.process_table import Process, processes, read_process


def children_of_this() -> list[Process]:
    """The children of this process, zombies included."""
    pids: set[int] = set()
    try:
        for task in Path("/proc/self/task").iterdir():
            pids.update(int(pid) for pid in (task / "children").read_text().split())
    except OSError:  # a kernel without these files
        return [process for process in processes().values() if process.parent == os.getpid()]
    found = (read_process(pid) for pid in pids)
    return [process for process in found if process is not None]


def send(process: Process, number: int) -> None:
    """Send a signal to this very process, never to one that has been given its number since; nothing where it is gone.

    Raises:
        PermissionError: it belongs to somebody else.
    """
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            now = read_process(process.pid)
            if now is not None and now.started_ticks == process.started_ticks:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def until_gone(pids: Collection[int], within_s: float) -> None:
    """Wait until all of these have ended, reaped or not, or the time is over."""
    until_s = time.monotonic() + within_s
    waiter = select.poll()
    descriptors = set()
    try:
        for pid in pids:
            with suppress(OSError):
                descriptor = os.pidfd_open(pid)
                descriptors.add(descriptor)
                waiter.register(descriptor, select.POLLIN)
        while descriptors and (left_s := until_s - time.monotonic()) > 0:
            for descriptor, _ in waiter.poll(left_s * 1000):
                waiter.unregister(descriptor)
                descriptors.discard(descriptor)
                os.close(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def describe(pid: int, proc: Path = PROC) -> str:
    """A line for people: number, name, state, and in which function of the kernel it waits, where that may be read."""
    process = read_process(pid, proc)
    if process is None:
        return f"{pid} (gone)"
    where = waits_in(pid, proc)
    return f"{pid} ({process.name}), state {process.state}" + (f", in {where}" if where else "")


def waits_in(pid: int, proc: Path = PROC) -> str:
    """The function of the kernel in which it waits; empty: in none, or it may not be read."""
    where = read_text(proc / str(pid) / "wchan")
    return where if where and where != "0" else ""
