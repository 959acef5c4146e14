"""Swap: a rank whose pages are on a disk makes all others wait."""

from __future__ import annotations

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, passed
from phalanx.core.kernel_files import parse_meminfo, read_text

_NAME = "swap"


def run(host: Host) -> CheckResult:
    """Say how much is swapped out; a note, no verdict."""
    memory = parse_meminfo(read_text(host.proc / "meminfo") or "")
    total, free = memory.get("SwapTotal", 0), memory.get("SwapFree", 0)
    if not total:
        return passed(_NAME, "none", value=0.0, unit="GiB used")
    used_gib = (total - free) / 2**30
    note = f"of {total / 2**30:.1f} GiB; pages on a disk slow every rank down: swapoff -a" if used_gib else ""
    return passed(_NAME, note, value=used_gib, unit="GiB used")


CHECK = Check(_NAME, "note: how much memory is on a disk", "passive", run)
