"""Rows of GPU memory that are to be replaced by spare ones, or could not be."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.checks.contract import Check
from phalanx.checks.gpus import Gpu
from phalanx.checks.gpus_needed import of_gpus
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed, passed

_NAME = "gpu-rows"


def run(host: Host) -> CheckResult:
    """Read the state of remapping."""
    return of_gpus(_NAME, host, judge_rows)


def judge_rows(gpus: Sequence[Gpu]) -> CheckResult:
    """The verdict on all GPUs."""
    broken = [f"GPU {gpu.index}" for gpu in gpus if gpu.rows_failed]
    if broken:
        return failed(_NAME, f"{', '.join(broken)}: a row could not be remapped", "replace the GPU")
    pending = [f"GPU {gpu.index}" for gpu in gpus if gpu.rows_pending]
    if pending:
        return failed(_NAME, f"{', '.join(pending)}: a row waits to be remapped", "reset the GPU: nvidia-smi -r")
    return passed(_NAME)


CHECK = Check(_NAME, "no row of GPU memory waits for, or has failed, its remapping", "passive", run, limit_s=15.0)
