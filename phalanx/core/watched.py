"""Processes that were started by this program or by one before it, told apart by their start time. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.core.kernel_files import boot_id
from phalanx.core.process_table import read_process


@dataclass(frozen=True)
class Identity:
    """A process: its number may be given again, its number and start time are not.

    Attributes:
        started_ticks: when it began, in clock ticks since the machine did.
        boot_id: of the machine's start.
    """

    pid: int
    started_ticks: int
    boot_id: str


def identity_of(pid: int) -> Identity | None:
    """Who has the number `pid` now; None where nobody has it, or what has it has ended."""
    process = read_process(pid)
    if process is None or process.state in "ZX":
        return None
    return Identity(pid, process.started_ticks, boot_id())


class Watched:
    """A process whose end is told in the running event loop, whoever its parent is.

    Args:
        identity: of the process.
        on_end: called once, when it is gone.

    Raises:
        ProcessLookupError: it is gone already.
    """

    def __init__(self, identity: Identity, on_end: Callable[[], None]) -> None:
        self.identity = identity
        self._on_end = on_end
        self._descriptor = os.pidfd_open(identity.pid)
        if identity_of(identity.pid) != identity:  # looked at after it was opened: the number cannot change hands now
            os.close(self._descriptor)
            raise ProcessLookupError(f"process {identity.pid} is another one now")
        self._ended = asyncio.Event()
        self.code: int | None = None
        """How it ended, as subprocess has it; None: it has not, or is no child of this process."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._end)

    def send(self, number: int) -> None:
        """Send it a signal; nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self._descriptor >= 0:
                signal.pidfd_send_signal(self._descriptor, number)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is gone; False: it is not, after `timeout_s`."""
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Watch it no longer."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _end(self) -> None:
        with contextlib.suppress(ChildProcessError):  # reaped where it is our child, so that it does not stay a zombie
            pid, status = os.waitpid(self.identity.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        self.close()
        self._ended.set()
        self._on_end()
