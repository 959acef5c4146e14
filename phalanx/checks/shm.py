"""/dev/shm: loaders, gloo and NCCL pass data through it, and a full one ends them with SIGBUS."""

from __future__ import annotations

import os

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed, skipped
from phalanx.checks.thresholds import Threshold, given_threshold, hold

_NAME = "shm"
_ACTION = "make it larger: mount -o remount,size=50% /dev/shm, or docker run --shm-size / --ipc=host"

# Docker's default of 64 MiB is the classic case; torch's documentation names it as too small for its loaders.
_LEAST = Threshold(0.125, "twice what Docker gives by default, which torch's loaders exhaust")


def run(host: Host) -> CheckResult:
    """Ask for its free space."""
    try:
        found = os.statvfs(host.dev / "shm")
    except OSError:
        return skipped(_NAME, f"no {host.dev / 'shm'}")
    free_gib = found.f_bavail * found.f_frsize / 2**30
    if found.f_flag & os.ST_RDONLY:
        return failed(_NAME, "it is read-only", "remount it writable", value=free_gib, unit="GiB free")
    return hold(_NAME, free_gib, "GiB free", given_threshold(host, _NAME) or _LEAST, _ACTION)


CHECK = Check(_NAME, "shared memory is large enough", "passive", run)
