"""The state of a host, read often and cheaply. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from phalanx.core.kernel_files import parse_cpu_ticks, parse_meminfo
from phalanx.run.executor.accelerators import Accelerators
from phalanx.run.executor.interfaces import read_interfaces
from phalanx.run.executor.late import Late
from phalanx.run.executor.link_troubles import LinkTroubles
from phalanx.run.messages import HostState

_DISK_S = 0.05  # the folder may be on a server that is gone


class Sensors:
    """Reads the state of this host.

    Args:
        folder: where the job writes; how much is free there is reported.
        interfaces: names, from `phalanx.run.executor.interfaces.choose_interfaces`.
        accelerators: of the host.
        proc_root, sys_root: where /proc and /sys are.
    """

    def __init__(
        self,
        folder: Path,
        interfaces: Sequence[str],
        accelerators: Accelerators,
        *,
        proc_root: Path = Path("/proc"),
        sys_root: Path = Path("/sys"),
    ) -> None:
        self._interfaces, self._troubles = list(interfaces), LinkTroubles()
        self._accelerators = accelerators
        self._proc = proc_root
        self._sys = sys_root
        self._disk = Late(lambda: _free_bytes(folder), f"the file system of {folder}", -1)
        self._ticks = (0, 0)

    def read(self) -> HostState:
        """The state now. ``cpu_load`` is the share of all cores that was busy since the last call, 0 to 1; what free
        disk space is not known is -1.

        Raises:
            OSError: /proc cannot be read.
        """
        total_bytes, free_bytes = self._memory()
        return HostState(
            cpu_load=self._load(),
            memory_bytes=total_bytes,
            memory_free_bytes=free_bytes,
            disk_free_bytes=self._disk.take(_DISK_S),
            interfaces=self._troubles.since_begun(read_interfaces(self._interfaces, self._sys, self._proc)),
            accelerators=self._accelerators.read(),
        )

    def _load(self) -> float:
        ticks = parse_cpu_ticks((self._proc / "stat").read_text())
        if ticks is None:
            return 0.0
        before, self._ticks = self._ticks, ticks
        busy, passed = ticks[0] - before[0], ticks[1] - before[1]
        return min(1.0, max(0.0, busy / passed)) if passed > 0 else 0.0

    def _memory(self) -> tuple[int, int]:
        """Bytes of all memory, and of what can be had without swapping."""
        found = parse_meminfo((self._proc / "meminfo").read_text())
        return found["MemTotal"], found.get("MemAvailable", found.get("MemFree", 0))


def _free_bytes(folder: Path) -> int:
    """What this user may still write."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
