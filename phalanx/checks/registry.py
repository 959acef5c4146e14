"""All checks, in the order in which they are shown. To add one: write a file with a `CHECK`, and name it here."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.checks import (
    all_to_all,
    clock,
    cores,
    disk,
    gemm,
    gemm_repeat,
    gpu_copy,
    gpu_count,
    gpu_ecc,
    gpu_gemm,
    gpu_memory,
    gpu_nvlink,
    gpu_rows,
    gpu_throttle,
    gpu_xid,
    leftovers,
    limits,
    loopback,
    memory_bandwidth,
    memory_errors,
    memory_size,
    nic_errors,
    nic_flaps,
    nic_link,
    nic_rate,
    peers,
    shm,
    space,
    storage,
    swap,
    timeouts,
    tuning,
)
from phalanx.checks.contract import Check
from phalanx.core.errors import UserError

CHECKS: tuple[Check, ...] = (
    cores.CHECK,
    gemm.CHECK,
    gemm_repeat.CHECK,
    memory_size.CHECK,
    memory_errors.CHECK,
    memory_bandwidth.CHECK,
    swap.CHECK,
    gpu_count.CHECK,
    gpu_memory.CHECK,
    gpu_ecc.CHECK,
    gpu_rows.CHECK,
    gpu_throttle.CHECK,
    gpu_nvlink.CHECK,
    gpu_xid.CHECK,
    gpu_copy.CHECK,
    gpu_gemm.CHECK,
    nic_link.CHECK,
    nic_rate.CHECK,
    nic_flaps.CHECK,
    nic_errors.CHECK,
    loopback.CHECK,
    peers.CHECK,
    all_to_all.CHECK,
    space.CHECK,
    disk.CHECK,
    storage.CHECK,
    clock.CHECK,
    leftovers.CHECK,
    timeouts.CHECK,
    shm.CHECK,
    limits.CHECK,
    tuning.CHECK,
)


def named(names: Iterable[str], checks: tuple[Check, ...] = CHECKS) -> list[Check]:
    """The checks of these names, in their order; raises `UserError` for a name that none has."""
    names = list(names)
    known = [check.name for check in checks]
    for name in names:
        if name not in known:
            raise UserError("there is no such check", cure=f"one of {', '.join(known)}", value=name)
    return [check for check in checks if check.name in names]
