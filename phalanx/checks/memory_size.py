"""Size of the memory: a module that has failed makes it smaller after a boot."""

from __future__ import annotations

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.memory import recall, remember
from phalanx.checks.result import CheckResult, skipped
from phalanx.checks.thresholds import Threshold, given_threshold, hold
from phalanx.core.kernel_files import parse_meminfo, read_text

_NAME = "memory-size"
_ACTION = "look for a memory module that failed: dmidecode -t memory"

_SHARE = 0.98  # what the kernel takes for itself varies with its version


def run(host: Host) -> CheckResult:
    """Compare the memory with the most that was seen here."""
    total_gib = parse_meminfo(read_text(host.proc / "meminfo") or "").get("MemTotal", 0) / 2**30
    if not total_gib:
        return skipped(_NAME, "the system does not tell")
    most_gib = float(recall(host.cache, _NAME).get("most_gib", 0.0))
    if total_gib > most_gib:
        remember(host.cache, _NAME, {"most_gib": total_gib})
    own = Threshold(_SHARE * most_gib, f"{_SHARE:.0%} of {most_gib:.1f}, the most seen here") if most_gib else None
    return hold(_NAME, total_gib, "GiB", given_threshold(host, _NAME) or own, _ACTION)


CHECK = Check(_NAME, "no memory module is missing", "passive", run)
