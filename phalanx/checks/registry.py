"""All checks, in the order in which they are shown. To add one: write a file with a `CHECK`, and name it here."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.checks import cpu, disks, gpu, leftovers, memory, network, nic, system
from phalanx.checks.contract import Check
from phalanx.core.errors import UserError

CHECKS: tuple[Check, ...] = (
    cpu.CORES,
    cpu.GEMM,
    cpu.GEMM_REPEAT,
    memory.SIZE,
    memory.ERRORS,
    memory.BANDWIDTH,
    memory.SWAP,
    gpu.COUNT,
    gpu.MEMORY,
    gpu.ECC,
    gpu.ROWS,
    gpu.THROTTLE,
    gpu.NVLINK,
    gpu.XID,
    gpu.COPY,
    gpu.PRODUCTS,
    nic.LINK,
    nic.RATE,
    nic.FLAPS,
    nic.ERRORS,
    network.LOOPBACK,
    network.PEERS,
    network.ALL_TO_ALL,
    disks.SPACE,
    disks.DISK,
    disks.STORAGE,
    system.CLOCK,
    leftovers.CHECK,
    system.TIMEOUTS,
    memory.SHM,
    system.LIMITS,
    system.TUNING,
)


def named(names: Iterable[str], checks: tuple[Check, ...] = CHECKS) -> list[Check]:
    """The checks of these names, in their order; raises `UserError` for a name that none has."""
    names = list(names)
    known = [check.name for check in checks]
    for name in names:
        if name not in known:
            raise UserError("there is no such check", cure=f"one of {', '.join(known)}", value=name)
    return [check for check in checks if check.name in names]
