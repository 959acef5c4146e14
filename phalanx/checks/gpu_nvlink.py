"""NVLink: are all links of all GPUs up?"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.checks.contract import Check
from phalanx.checks.gpus import Gpu
from phalanx.checks.gpus_needed import of_gpus
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, skipped
from phalanx.checks.thresholds import Threshold

_NAME = "gpu-nvlink"


def run(host: Host) -> CheckResult:
    """Read the state of the links."""
    return of_gpus(_NAME, host, judge_nvlink)


def judge_nvlink(gpus: Sequence[Gpu]) -> CheckResult:
    """The verdict on the GPU with the fewest links up.

    A GPU that has no link up at all is not judged where none has: PCIe cards have links without a bridge.
    """
    most = max(gpu.links_up for gpu in gpus)
    if not most:
        return skipped(_NAME, "no NVLink is in use here")
    worst = min(gpus, key=lambda gpu: gpu.links_up)
    threshold = Threshold(most, f"the most of any of this host's {len(gpus)} GPUs")
    bad = [f"GPU {gpu.index}: {gpu.links_up} of {most}" for gpu in gpus if gpu.links_up < most]
    action = "check fabric manager (systemctl status nvidia-fabricmanager) and Xid 74 in dmesg; reset the GPU"
    common = (float(worst.links_up), "links up", threshold.value, threshold.source)
    return CheckResult(_NAME, "fail" if bad else "pass", "; ".join(bad), *common, action if bad else "")


CHECK = Check(_NAME, "every GPU has as many NVLinks up as the others", "passive", run, limit_s=15.0)
