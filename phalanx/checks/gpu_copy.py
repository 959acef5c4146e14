"""Copies between pinned host memory and each GPU: the PCIe link."""

from __future__ import annotations

from typing import Any

from phalanx.checks.contract import Check
from phalanx.checks.gemm import best_time
from phalanx.checks.gpus_needed import with_torch
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult
from phalanx.checks.thresholds import copy_threshold, judge

_NAME = "gpu-copy"
_BYTES = 256 << 20
_BUDGET_S = 0.3
_ACTION = "compare the GPU's PCIe link with the others (lspci -vv, LnkSta): speed and width; reseat it"


def run(host: Host) -> CheckResult:
    """Copy to and from each GPU in turn; the slowest one to copy to is judged."""
    return with_torch(_NAME, host, lambda torch: _measure(torch, host))


def _measure(torch: Any, host: Host) -> CheckResult:
    rates = {index: _copy(torch, index) for index in range(torch.cuda.device_count())}
    slowest = min(rates, key=lambda index: rates[index][0])
    there, back = rates[slowest]
    name = torch.cuda.get_device_name(slowest)
    result = judge(host, _NAME, there, "GB/s", known=copy_threshold(name), action=_ACTION, hardware=name)
    return result.explained(result.reason, f"GPU {slowest}", f"back at {back:.1f} GB/s")


def _copy(torch: Any, index: int) -> tuple[float, float]:
    """GB/s to the GPU and back."""
    with torch.cuda.device(index):
        here = torch.ones(_BYTES, dtype=torch.uint8).pin_memory()
        there = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")

        def timed(target: Any, source: Any) -> float:
            def work() -> None:
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()

            return _BYTES / best_time(work, _BUDGET_S) / 1e9

        return timed(there, here), timed(here, there)


CHECK = Check(
    _NAME, "copies between host and each GPU", "full", run, 120.0, isolated=True, uses=frozenset({"gpu", "memory"})
)
