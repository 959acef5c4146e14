"""Taking memory until there is none: only in a process that a limit keeps from harming others. Torch-free."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil

from phalanx.core.kernel_files import PROC, own_groups, read_text
from phalanx.faults.agenda import Order
from phalanx.faults.injectors.base import Act, RefusedError, Surroundings

_PIECE_BYTES = 16 << 20
_PART = 0.5
"""Of the machine's memory: a limit above it protects nobody."""


def out_of_memory(order: Order, around: Surroundings) -> Act:
    """Take memory until the system refuses it (MemoryError) or a memory cgroup kills the process.

    With ``limit_mb`` the process first limits its own address space to that much more than it has.

    Raises:
        RefusedError: neither RLIMIT_AS nor a memory cgroup of its own limits this process to half of the machine.
    """
    extra_mb = int(order.settings.get("limit_mb", 0))
    limits = [resource.getrlimit(resource.RLIMIT_AS)[0], *own_cgroup_limits()]
    if extra_mb <= 0 and not is_limited(limits, psutil.virtual_memory().total):
        raise RefusedError("no limit of memory protects this machine: set RLIMIT_AS, a memory cgroup, or limit_mb")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    own = psutil.Process()

    def act() -> None:
        taken = []
        if extra_mb:
            wanted = own.memory_info().vms + (extra_mb << 20)
            resource.setrlimit(resource.RLIMIT_AS, (wanted if hard < 0 else min(wanted, hard), hard))
        try:
            while True:
                taken.append(bytearray(b"\1") * _PIECE_BYTES)
        except MemoryError:
            taken.clear()
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))  # so that its end is an orderly one
            raise

    return act


def is_limited(limits_bytes: list[int], machine_bytes: int) -> bool:
    """Whether any limit (negative: unlimited) is at most half of the machine's memory."""
    return any(0 <= limit <= machine_bytes * _PART for limit in limits_bytes)


def own_cgroup_limits(proc: Path = PROC, root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Limits in bytes of the memory cgroup (of either version) that holds this process and no other but its children.

    A cgroup with others in it is left out: the kernel might choose one of them.
    """
    limits = []
    groups = own_groups(proc)
    for name, top, file in (("memory", root / "memory", "memory.limit_in_bytes"), ("", root, "memory.max")):
        if name not in groups:
            continue
        folder = top / groups[name].lstrip("/")
        limit = read_text(folder / file) or ""
        if limit.isdecimal() and _holds_only_us(read_text(folder / "cgroup.procs") or ""):
            limits.append(int(limit))
    return limits


def _holds_only_us(pids: str) -> bool:
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    return bool(pids) and {int(pid) for pid in pids.split()} <= ours
