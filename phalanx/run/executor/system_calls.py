"""System calls without a function in Python, waiting for ends. Linux only."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from phalanx.core.host import PROC, read_text
from phalanx.ipc.processes import Process, processes, read_process

# From <linux/prctl.h>, <linux/sched.h> and <linux/mount.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS = 0x00020000
_CLONE_NEWPID = 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_REC, _MS_SLAVE = 1 << 14, 1 << 19


def become_subreaper() -> None:
    """Have processes below this one whose parent has gone become its children, rather than those of the host's init.

    Raises:
        OSError: the kernel refuses.
    """
    _check(_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends.

    Args:
        parent: what `os.getppid` gives while the parent lives: 0 for one outside of a PID namespace.
    """
    _check(_libc().prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it went before this call
        os._exit(1)


def unshare_pids() -> None:
    """The next child of this process is the init of a new PID namespace. Raises OSError: that is not permitted."""
    _check(_libc().unshare(_CLONE_NEWPID), "unshare(CLONE_NEWPID)")


def mount_own_proc() -> None:
    """Show this process and its descendants a /proc of their own PID namespace; nobody else sees that mount.

    Raises:
        OSError: that is not permitted.
    """
    libc = _libc()
    _check(libc.unshare(_CLONE_NEWNS), "unshare(CLONE_NEWNS)")
    # What the host mounts later is still seen here; what is mounted here is not seen there.
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "making mounts private")
    _check(libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None), "mounting /proc")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


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
