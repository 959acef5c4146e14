"""The memory of the host: its size, errors and bandwidth, what of it is on a disk, and what is shared.

A module that has failed makes it smaller after a boot. A rank whose pages are swapped out makes all others wait.
Loaders, gloo and NCCL pass data through /dev/shm, and a full one ends them with SIGBUS.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from phalanx.checks.check_host import Check, CheckResult, Host, failed, passed, recall, remember, skipped
from phalanx.checks.cpu import best_time
from phalanx.checks.pairwise_tests import Threshold
from phalanx.checks.thresholds import OtherWork, given_threshold, hold, judge
from phalanx.core.host import list_folder, parse_meminfo, read_number, read_text

_SIZE_NAME = "memory-size"
_SIZE_ACTION = "look for a memory module that failed: dmidecode -t memory"

_SHARE = 0.98  # what the kernel takes for itself varies with its version


def check_size(host: Host) -> CheckResult:
    """Compare the memory with the most that was seen here."""
    total_gib = parse_meminfo(read_text(host.proc / "meminfo") or "").get("MemTotal", 0) / 2**30
    if not total_gib:
        return skipped(_SIZE_NAME, "the system does not tell")
    most_gib = float(recall(host.cache, _SIZE_NAME).get("most_gib", 0.0))
    if total_gib > most_gib:
        remember(host.cache, _SIZE_NAME, {"most_gib": total_gib})
    own = Threshold(_SHARE * most_gib, f"{_SHARE:.0%} of {most_gib:.1f}, the most seen here") if most_gib else None
    return hold(_SIZE_NAME, total_gib, "GiB", given_threshold(host, _SIZE_NAME) or own, _SIZE_ACTION)


SIZE = Check(_SIZE_NAME, "no memory module is missing", "passive", check_size)


_ERRORS_NAME = "memory-errors"


def check_errors(host: Host) -> CheckResult:
    """Add up the counters of all memory controllers."""
    folders = [each for each in list_folder(host.sys / "devices/system/edac/mc") if (each / "ue_count").exists()]
    if not folders:
        reason = "the kernel counts no memory errors here (no ECC, a virtual machine, or no EDAC driver)"
        return skipped(_ERRORS_NAME, reason)
    bad = {each.name: read_number(each / "ue_count") or 0 for each in folders}
    corrected = sum(read_number(each / "ce_count") or 0 for each in folders)
    total = sum(bad.values())
    names = ", ".join(
        f"{name} ({read_text(host.sys / 'devices/system/edac/mc' / name / 'mc_name') or 'controller'})"
        for name, count in bad.items()
        if count
    )
    reason = f"{names} could not correct {total}; " if total else ""
    return CheckResult(
        _ERRORS_NAME,
        "fail" if total else "pass",
        f"{reason}{corrected} corrected since the boot",
        float(total),
        "uncorrected",
        0.0,
        "no error that ECC cannot correct is tolerable",
        "take the host out and replace the memory module" if total else "",
    )


ERRORS = Check(_ERRORS_NAME, "no memory error that ECC could not correct", "passive", check_errors)


_BANDWIDTH_NAME = "memory-bandwidth"
_BLOCK_BYTES = 32 << 20  # for each thread, and twice: more than a core's share of any cache
_MOST_THREADS = 32
_BUDGET_S = 0.3
_BANDWIDTH_ACTION = "look for other work on the host, a missing memory module (dmidecode -t memory) and NUMA settings"


def check_bandwidth(host: Host) -> CheckResult:
    """Copy for a moment; a copied byte counts twice, since it is read and written."""
    import numpy as np

    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    sources = [np.ones(_BLOCK_BYTES, dtype=np.uint8) for _ in range(threads)]
    targets = [np.empty_like(source) for source in sources]
    with ThreadPoolExecutor(threads) as pool, OtherWork(host.proc) as other:
        seconds = best_time(lambda: list(pool.map(np.copyto, targets, sources)), _BUDGET_S)
    rate = 2 * _BLOCK_BYTES * threads / seconds / 1e9
    return judge(host, _BANDWIDTH_NAME, rate, "GB/s", action=_BANDWIDTH_ACTION, other=other)


BANDWIDTH = Check(
    _BANDWIDTH_NAME,
    "rate of copies in memory",
    "quick",
    check_bandwidth,
    20.0,
    isolated=True,
    uses=frozenset({"cpu", "memory"}),
)


def check_swap(host: Host) -> CheckResult:
    """Say how much is swapped out; a note, no verdict."""
    memory = parse_meminfo(read_text(host.proc / "meminfo") or "")
    total, free = memory.get("SwapTotal", 0), memory.get("SwapFree", 0)
    if not total:
        return passed("swap", "none", value=0.0, unit="GiB used")
    used_gib = (total - free) / 2**30
    note = f"of {total / 2**30:.1f} GiB; pages on a disk slow every rank down: swapoff -a" if used_gib else ""
    return passed("swap", note, value=used_gib, unit="GiB used")


SWAP = Check("swap", "note: how much memory is on a disk", "passive", check_swap)


_SHM_NAME = "shm"
_SHM_ACTION = "make it larger: mount -o remount,size=50% /dev/shm, or docker run --shm-size / --ipc=host"

# Docker's default of 64 MiB is the classic case; torch's documentation names it as too small for its loaders.
_LEAST = Threshold(0.125, "twice what Docker gives by default, which torch's loaders exhaust")


def check_shm(host: Host) -> CheckResult:
    """Ask for its free space."""
    try:
        found = os.statvfs(host.dev / "shm")
    except OSError:
        return skipped(_SHM_NAME, f"no {host.dev / 'shm'}")
    free_gib = found.f_bavail * found.f_frsize / 2**30
    if found.f_flag & os.ST_RDONLY:
        return failed(_SHM_NAME, "it is read-only", "remount it writable", value=free_gib, unit="GiB free")
    return hold(_SHM_NAME, free_gib, "GiB free", given_threshold(host, _SHM_NAME) or _LEAST, _SHM_ACTION)


SHM = Check(_SHM_NAME, "shared memory is large enough", "passive", check_shm)
