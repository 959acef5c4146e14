"""The few system calls that Python has no function for. Linux, torch-free."""

from __future__ import annotations

import ctypes
import os
import signal

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
    if os.getppid() != parent:  # it went before the kernel was told
        os._exit(1)


def unshare_pids() -> None:
    """The next child of this process is the init of a new PID namespace.

    Raises:
        OSError: that is not permitted.
    """
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
