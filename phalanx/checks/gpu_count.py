"""GPUs: does the driver speak to all that are on the PCI bus, and to as many as before?"""

from __future__ import annotations

from phalanx.checks.contract import Check
from phalanx.checks.gpus import Gpu, NoGpusError, SilentGpusError, count_on_bus
from phalanx.checks.host import Host
from phalanx.checks.memory import recall, remember
from phalanx.checks.result import CheckResult, failed, skipped
from phalanx.checks.thresholds import Threshold, given_threshold, hold

_NAME = "gpu-count"
_ACTION = "take the host out; reset the GPU (nvidia-smi -r) or reboot; look for Xid 79 in dmesg"


def run(host: Host) -> CheckResult:
    """Compare the driver's answer with the bus and with earlier checks."""
    on_bus = count_on_bus(host.sys)
    most = int(recall(host.cache, _NAME).get("most", 0))
    try:
        gpus: tuple[Gpu, ...] = host.gpus.read()
    except NoGpusError as absent:
        if most == 0 and on_bus == 0:
            return skipped(_NAME, str(absent))
        return failed(_NAME, f"{max(most, on_bus)} GPUs should be here, but: {absent}", "load or install the driver")
    except SilentGpusError as silent:
        return failed(_NAME, str(silent), _ACTION)
    remember(host.cache, _NAME, {"most": max(most, len(gpus))})
    return judge_count(len(gpus), on_bus, most, given_threshold(host, _NAME))


def judge_count(found: int, on_bus: int, most: int, given: Threshold | None) -> CheckResult:
    """The verdict on how many GPUs the driver speaks to."""
    threshold = given or max(
        Threshold(on_bus, "GPUs on the PCI bus"),
        Threshold(most, "most that were seen here"),
        key=lambda each: each.value,
    )
    return hold(_NAME, found, "GPUs", threshold if threshold.value else None, _ACTION)


CHECK = Check(_NAME, "the driver speaks to every GPU on the bus", "passive", run, limit_s=15.0)
