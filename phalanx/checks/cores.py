"""Cores: are all that the host has online, and may this process use them?"""

from __future__ import annotations

import os

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult
from phalanx.checks.thresholds import Threshold, given_threshold, hold
from phalanx.core.kernel_files import own_groups, read_number, read_text

_NAME = "cores"


def run(host: Host) -> CheckResult:
    """Count the cores that are present, online and allowed."""
    system = host.sys / "devices/system/cpu"
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_quota(host)
    return judge_cores(
        count_list(read_text(system / "present") or ""),
        count_list(read_text(system / "online") or ""),
        allowed,
        quota,
        given_threshold(host, _NAME),
        smt_off=(read_text(system / "smt/control") or "") in ("off", "forceoff"),
    )


def judge_cores(
    present: int,
    online: int,
    allowed: int,
    quota: float | None,
    given: Threshold | None = None,
    *,
    smt_off: bool = False,
) -> CheckResult:
    """The verdict.

    Args:
        quota: cores' worth of time that the control group grants; None: no limit.
        smt_off: somebody switched off the second thread of each core; they are present and offline then.
    """
    notes = ["the second thread of each core is switched off"] if smt_off else []
    if allowed < online:
        notes.append(f"this process may use {allowed} of {online}")
    if quota is not None and quota < allowed:
        notes.append(f"its control group grants the time of {quota:g}")
    if given:
        return hold(_NAME, min(allowed, quota or allowed), "cores", given, "ask for more cores, or bring them online")
    threshold = Threshold(present, "cores that are present") if present and not smt_off else None
    result = hold(
        _NAME, online or allowed, "cores", threshold, "bring them online: /sys/devices/system/cpu/cpu*/online"
    )
    return result.explained(result.reason, *notes)


def count_list(text: str) -> int:
    """How many numbers a list of the kernel names: ``0-3,8`` -> 5."""
    total = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total


def read_quota(host: Host) -> float | None:
    """Cores' worth of time that the control group of this process grants; None: no limit."""
    group = own_groups(host.proc).get("")
    text = read_text(host.sys / "fs/cgroup" / group.lstrip("/") / "cpu.max") if group is not None else None
    quota, _, period = (text or "max 1").partition(" ")
    if quota != "max":
        return int(quota) / int(period)
    quota_us = read_number(host.sys / "fs/cgroup/cpu/cpu.cfs_quota_us") or -1
    period_us = read_number(host.sys / "fs/cgroup/cpu/cpu.cfs_period_us") or 0
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


CHECK = Check(_NAME, "all cores are online; how many this process may use", "passive", run)
