"""Clocks of the GPUs that heat, power or the board hold down. A power cap by software is normal and does not count."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.checks.contract import Check
from phalanx.checks.gpus import Gpu
from phalanx.checks.gpus_needed import of_gpus
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed, passed

_NAME = "gpu-throttle"


def run(host: Host) -> CheckResult:
    """Read why clocks are low, at this moment."""
    return of_gpus(_NAME, host, judge_throttle)


def judge_throttle(gpus: Sequence[Gpu]) -> CheckResult:
    """The verdict on all GPUs; the value is the hottest one's temperature."""
    known = [gpu.temperature_c for gpu in gpus if gpu.temperature_c is not None]
    hottest = max(known) if known else None
    slow = [f"GPU {gpu.index}: {', '.join(gpu.throttled)}" for gpu in gpus if gpu.throttled]
    if slow:
        return failed(
            _NAME, "; ".join(slow), "check fans, inlet temperature and power supplies", value=hottest, unit="°C"
        )
    return passed(_NAME, value=hottest, unit="°C")


CHECK = Check(_NAME, "no GPU is slowed down by heat or power", "passive", run, limit_s=15.0)
