"""Bandwidth of the memory: large copies, a thread for each core."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from phalanx.checks.busy import OtherWork
from phalanx.checks.contract import Check
from phalanx.checks.gemm import best_time
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult
from phalanx.checks.thresholds import judge

_NAME = "memory-bandwidth"
_BLOCK_BYTES = 32 << 20  # for each thread, and twice: more than a core's share of any cache
_MOST_THREADS = 32
_BUDGET_S = 0.3
_ACTION = "look for other work on the host, a missing memory module (dmidecode -t memory) and NUMA settings"


def run(host: Host) -> CheckResult:
    """Copy for a moment; a copied byte counts twice, since it is read and written."""
    import numpy as np

    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    sources = [np.ones(_BLOCK_BYTES, dtype=np.uint8) for _ in range(threads)]
    targets = [np.empty_like(source) for source in sources]
    with ThreadPoolExecutor(threads) as pool, OtherWork(host.proc) as other:
        seconds = best_time(lambda: list(pool.map(np.copyto, targets, sources)), _BUDGET_S)
    rate = 2 * _BLOCK_BYTES * threads / seconds / 1e9
    return judge(host, _NAME, rate, "GB/s", action=_ACTION, other=other)


CHECK = Check(_NAME, "rate of copies in memory", "quick", run, 20.0, isolated=True, uses=frozenset({"cpu", "memory"}))
