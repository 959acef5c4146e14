"""Memory of the GPUs: as large as that of the others in this host, and free of what others left there."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.checks.contract import Check
from phalanx.checks.gpus import Gpu
from phalanx.checks.gpus_needed import of_gpus
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed
from phalanx.checks.thresholds import Threshold, hold

_NAME = "gpu-memory"
_SHARE = 0.98


def run(host: Host) -> CheckResult:
    """Compare the GPUs with each other."""
    return of_gpus(_NAME, host, judge_memory)


def judge_memory(gpus: Sequence[Gpu]) -> CheckResult:
    """The verdict on the GPU with the least memory among those of one name."""
    names = {gpu.name for gpu in gpus}
    if len(names) > 1:
        return failed(_NAME, f"this host mixes {', '.join(sorted(names))}", "use hosts whose GPUs are alike")
    least = min(gpus, key=lambda gpu: gpu.memory_bytes)
    most_gib = max(gpu.memory_bytes for gpu in gpus) / 2**30
    threshold = Threshold(_SHARE * most_gib, f"{_SHARE:.0%} of the largest of this host's {len(gpus)}")
    own_gib = least.memory_bytes / 2**30
    result = hold(_NAME, own_gib, "GiB", threshold if len(gpus) > 1 else None, "reset the GPU; check MIG and ECC")
    used = [f"GPU {gpu.index}: {gpu.memory_used_bytes / 2**30:.1f} GiB" for gpu in gpus if gpu.memory_used_bytes]
    reason = f"GPU {least.index}: {result.reason}" if result.outcome == "fail" else ""
    return result.explained(reason, f"in use: {', '.join(used)}" if used else "")


CHECK = Check(_NAME, "GPUs of one host have the same memory", "passive", run, limit_s=15.0)
