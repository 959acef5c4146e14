"""GPUs: does the driver speak to all that have a device file, and to as many as before?

The PCI bus shows all of the host's, also in a container that was given some of them, so it is a note only.
"""

from __future__ import annotations

from phalanx.checks.contract import Check
from phalanx.checks.gpus import Gpu, NoGpusError, SilentGpusError, count_files, count_on_bus
from phalanx.checks.host import Host
from phalanx.checks.memory import recall, remember
from phalanx.checks.result import CheckResult, failed, skipped
from phalanx.checks.thresholds import Threshold, given_threshold, hold

_NAME = "gpu-count"
_ACTION = "take the host out; reset the GPU (nvidia-smi -r) or reboot; look for Xid 79 in dmesg"


def run(host: Host) -> CheckResult:
    """Compare the driver's answer with device files and earlier checks."""
    files = count_files(host.dev)
    most = int(recall(host.cache, _NAME).get("most", 0))
    try:
        gpus: tuple[Gpu, ...] = host.gpus.read()
    except NoGpusError as absent:
        if most == 0 and files == 0:
            return skipped(_NAME, str(absent))
        return failed(_NAME, f"{max(most, files)} GPUs should be here, but: {absent}", "load or install the driver")
    except SilentGpusError as silent:
        return failed(_NAME, str(silent), _ACTION)
    remember(host.cache, _NAME, {"most": max(most, len(gpus))})
    result = judge_count(len(gpus), files, most, given_threshold(host, _NAME))
    on_bus = count_on_bus(host.sys)
    return result.explained(result.reason, f"{on_bus} are on the bus" if on_bus > len(gpus) else "")


def judge_count(found: int, files: int, most: int, given: Threshold | None) -> CheckResult:
    """The verdict on how many GPUs the driver speaks to."""
    here, before = Threshold(files, "device files of GPUs"), Threshold(most, "most that were seen here")
    threshold = given or max(here, before, key=lambda each: each.value)
    return hold(_NAME, found, "GPUs", threshold if threshold.value else None, _ACTION)


CHECK = Check(_NAME, "the driver speaks to every GPU that should be here", "passive", run, limit_s=15.0)
