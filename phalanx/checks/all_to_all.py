"""All-to-all among the ranks of this host: NCCL over its GPUs, else gloo over some of its cores."""

from __future__ import annotations

import importlib
import os

from phalanx.checks.busy import OtherWork
from phalanx.checks.collective import CollectiveError, run_here
from phalanx.checks.contract import Check
from phalanx.checks.gpus import NoGpusError, SilentGpusError
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed, skipped
from phalanx.checks.thresholds import all_to_all_threshold, judge

_NAME = "all-to-all"
_GPU_BYTES = 512 << 20  # as the published figures
_CPU_BYTES = 16 << 20
_MOST_RANKS = 8
_LIMIT_S = 80.0


def run(host: Host) -> CheckResult:
    """Exchange data between all ranks, and check what arrives."""
    try:
        gpus = host.gpus.read()
    except NoGpusError:
        gpus = ()
    except SilentGpusError as silent:
        return failed(_NAME, str(silent), "take the host out; reset the GPUs or reboot")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = len(gpus) if gpus else min(_MOST_RANKS, cores)
    if size < 2:
        return skipped(_NAME, f"one {'GPU' if gpus else 'core'} has nobody to exchange with")
    if gpus and not importlib.import_module("torch").cuda.is_available():
        return skipped(_NAME, "torch cannot use CUDA here")
    known = all_to_all_threshold(gpus[0].name, size) if gpus else None
    what = f"{size} GPUs, NCCL" if gpus else f"{size} processes, gloo"
    try:
        num_bytes = _GPU_BYTES if gpus else _CPU_BYTES
        with OtherWork(host.proc) as other:
            rate = run_here("all-to-all", size, num_bytes=num_bytes, limit_s=_LIMIT_S, on_gpus=bool(gpus))
    except CollectiveError as error:
        return failed(_NAME, f"{what}: {error}", "look at NVLink, fabric manager and dmesg; NCCL_DEBUG=INFO tells more")
    action = "look at NVLink and PCIe of each GPU; take the host out" if gpus else "look for other work on the host"
    result = judge(host, _NAME, rate / 1e9, "GB/s", known=known, action=action, hardware=what, other=other)
    return result.explained(result.reason, what)


CHECK = Check(
    _NAME,
    "all-to-all among the ranks of this host",
    "full",
    run,
    90.0,
    isolated=True,
    uses=frozenset({"cpu", "memory", "gpu"}),
)
