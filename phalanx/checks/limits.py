"""Limits of a process: files, processes, and memory that a network card may pin."""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed, passed
from phalanx.core.kernel_files import list_folder, read_text

_NAME = "limits"

FEWEST_FILES = 1024
"""What Linux gives by default; loaders, sockets to every peer and checkpoints need at least that."""

FEWEST_PROCESSES = 1024

_CAP_IPC_LOCK = 14


def run(host: Host) -> CheckResult:
    """Read the limits of this process, which a job started from here inherits."""
    read = {
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
        "pinned": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }
    pins = bool(list_folder(host.sys / "class/infiniband")) and not may_pin(read_text(host.proc / "self/status") or "")
    return judge_limits(read, has_rdma=pins)


def may_pin(status: str) -> bool:
    """Whether /proc/self/status says that limits of pinned memory do not hold for this process (CAP_IPC_LOCK)."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> _CAP_IPC_LOCK & 1)


def judge_limits(limits: Mapping[str, int], *, has_rdma: bool) -> CheckResult:
    """The verdict on soft limits, of which -1 is none; `has_rdma`: the one of pinned memory matters."""
    bad, cures = [], []
    if 0 <= limits["files"] < FEWEST_FILES:
        bad.append(f"only {limits['files']} open files, fewer than {FEWEST_FILES}")
        cures.append("ulimit -n")
    if 0 <= limits["processes"] < FEWEST_PROCESSES:
        bad.append(f"only {limits['processes']} processes, fewer than {FEWEST_PROCESSES}")
        cures.append("ulimit -u")
    if has_rdma and limits["pinned"] >= 0:
        bad.append(f"only {limits['pinned']} bytes may be pinned, and RDMA pins its buffers")
        cures.append("ulimit -l unlimited")
    if bad:
        return failed(_NAME, "; ".join(bad), f"raise it: {', '.join(cures)}, or /etc/security/limits.conf")
    shown = ", ".join(f"{name} {'unlimited' if value < 0 else value}" for name, value in limits.items())
    return passed(_NAME, shown)


CHECK = Check(_NAME, "enough open files, processes and pinned memory", "passive", run)
