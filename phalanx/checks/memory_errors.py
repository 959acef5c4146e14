"""Errors of the memory that the kernel has counted since the boot (EDAC)."""

from __future__ import annotations

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, skipped
from phalanx.checks.thresholds import Threshold
from phalanx.core.kernel_files import list_folder, read_number, read_text

_NAME = "memory-errors"
_LIMIT = Threshold(0.0, "no error that ECC cannot correct is tolerable")


def run(host: Host) -> CheckResult:
    """Add up the counters of all memory controllers."""
    folders = [each for each in list_folder(host.sys / "devices/system/edac/mc") if (each / "ue_count").exists()]
    if not folders:
        return skipped(_NAME, "the kernel counts no memory errors here (no ECC, a virtual machine, or no EDAC driver)")
    bad = {each.name: read_number(each / "ue_count") or 0 for each in folders}
    corrected = sum(read_number(each / "ce_count") or 0 for each in folders)
    total = sum(bad.values())
    names = ", ".join(
        f"{name} ({read_text(host.sys / 'devices/system/edac/mc' / name / 'mc_name') or 'controller'})"
        for name, count in bad.items()
        if count
    )
    reason = f"{names} could not correct {total}; " if total else ""
    return CheckResult(
        _NAME,
        "fail" if total else "pass",
        f"{reason}{corrected} corrected since the boot",
        float(total),
        "uncorrected",
        _LIMIT.value,
        _LIMIT.source,
        "take the host out and replace the memory module" if total else "",
    )


CHECK = Check(_NAME, "no memory error that ECC could not correct", "passive", run)
