"""The processes of a host, as /proc shows them. Linux, torch-free."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.kernel_files import PROC

_GONE = "ZXx"
_EXITING = 0x4 | 0x400  # PF_EXITING, PF_SIGNALED
_KILL_PENDING = 1 << (signal.SIGKILL - 1)
_STAT_BYTES = 4096


@dataclass(frozen=True)
class Process:
    """A process at one moment.

    Attributes:
        group, session: numbers of its process group and session.
        state: as in /proc: ``R``, ``S``, ``D`` (in the kernel, not to be killed), ``T`` (stopped), ``Z`` …
        threads: how many.
        cpu_ticks: CPU time so far, in clock ticks.
        started_ticks: when it began, after the boot; with its number it says which process it is.
    """

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    threads: int
    cpu_ticks: int
    started_ticks: int

    @property
    def is_alive(self) -> bool:
        """Whether it can still run: the leader of one with threads may be a zombie long before the others end."""
        return self.state not in _GONE or self.threads > 1


def read_process(pid: int, proc: Path = PROC) -> Process | None:
    """Look at one process; None where there is none."""
    try:
        descriptor = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # hundreds are read: no file object
    except OSError:
        return None
    try:
        return parse_stat(os.read(descriptor, _STAT_BYTES))
    except OSError:  # it has gone meanwhile
        return None
    finally:
        os.close(descriptor)


def is_dying(pid: int, proc: Path = PROC) -> bool:
    """Whether a process is ending, or has got a SIGKILL, though the kernel may not have freed its memory yet."""
    try:
        stat = Path(f"{proc}/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        status = Path(f"{proc}/{pid}/status").read_text(errors="replace")
    except OSError:  # there is no /proc, or no such process
        return False
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return bool(int(stat[6]) & _EXITING) or any(signals & _KILL_PENDING for signals in pending)


def parse_stat(content: bytes) -> Process | None:
    """What /proc/PID/stat holds; the name in it may hold anything, parentheses too; None for no such content."""
    head, _, rest = content.rpartition(b")")
    pid, _, name = head.partition(b" (")
    fields = rest.split()
    if len(fields) < 20:
        return None
    return Process(
        pid=int(pid),
        name=name.decode(errors="replace"),
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        threads=int(fields[17]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        started_ticks=int(fields[19]),
    )


def processes(proc: Path = PROC) -> dict[int, Process]:
    """All processes by their numbers, zombies included."""
    with os.scandir(proc) as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    found = (read_process(pid, proc) for pid in pids)
    return {process.pid: process for process in found if process is not None}


def descendants(table: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    """The processes below `roots`, without these."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found
