"""Errors of the GPUs' memory that ECC could not correct since the driver was loaded."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.checks.contract import Check
from phalanx.checks.gpus import Gpu
from phalanx.checks.gpus_needed import of_gpus
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, skipped
from phalanx.checks.thresholds import Threshold

_NAME = "gpu-ecc"
_LIMIT = Threshold(0.0, "no error that ECC cannot correct is tolerable")


def run(host: Host) -> CheckResult:
    """Read the counters."""
    return of_gpus(_NAME, host, judge_ecc)


def judge_ecc(gpus: Sequence[Gpu]) -> CheckResult:
    """The verdict on all GPUs."""
    counted = [gpu for gpu in gpus if gpu.ecc_uncorrected is not None]
    if not counted:
        return skipped(_NAME, "no GPU here has ECC, or it is off")
    bad = [gpu for gpu in counted if gpu.ecc_uncorrected]
    total = float(sum(gpu.ecc_uncorrected or 0 for gpu in bad))
    reason = ", ".join(f"GPU {gpu.index}: {gpu.ecc_uncorrected}" for gpu in bad)
    common = (total, "uncorrected", _LIMIT.value, _LIMIT.source)
    action = "reset the GPU (nvidia-smi -r); if it comes back, replace it"
    return CheckResult(_NAME, "fail" if bad else "pass", reason, *common, action if bad else "")


CHECK = Check(_NAME, "no GPU memory error that ECC could not correct", "passive", run, limit_s=15.0)
