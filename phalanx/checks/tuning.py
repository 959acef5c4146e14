"""Settings of the kernel that make steps slower or uneven. Notes, no verdict: a host may have its reasons."""

from __future__ import annotations

import re
from collections import Counter

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, passed
from phalanx.core.kernel_files import list_folder, read_text

_NAME = "tuning"


def run(host: Host) -> CheckResult:
    """Read governor, huge pages and NUMA balancing."""
    notes = [_governors(host), _huge_pages(host), _numa_balancing(host)]
    return passed(_NAME, "; ".join(filter(None, notes)))


def _governors(host: Host) -> str:
    folders = list_folder(host.sys / "devices/system/cpu")
    read = (read_text(folder / "cpufreq/scaling_governor") for folder in folders if folder.name.startswith("cpu"))
    found = Counter(filter(None, read))
    if not found or set(found) == {"performance"}:
        return ""
    named = ", ".join(f"{count} cores {name}" for name, count in sorted(found.items()))
    return f"CPU governor: {named}; steady steps want performance (cpupower frequency-set -g performance)"


def _huge_pages(host: Host) -> str:
    text = read_text(host.sys / "kernel/mm/transparent_hugepage/enabled") or ""
    match = re.search(r"\[(\w+)\]", text)
    return f"transparent huge pages: {match[1]}" if match else ""


def _numa_balancing(host: Host) -> str:
    nodes = [each for each in list_folder(host.sys / "devices/system/node") if re.fullmatch(r"node\d+", each.name)]
    if len(nodes) < 2 or read_text(host.proc / "sys/kernel/numa_balancing") in (None, "0"):
        return ""
    return "the kernel moves pages between NUMA nodes; ranks that are bound gain without: kernel.numa_balancing=0"


CHECK = Check(_NAME, "note: CPU governor, huge pages, NUMA balancing", "passive", run)
