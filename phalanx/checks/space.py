"""Room on the disk of the checkpoints, and whether it may be written.

`df` is asked in a process of its own, since a file system whose server is gone lets nobody go.
"""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed, skipped
from phalanx.checks.thresholds import Threshold, given_threshold, hold
from phalanx.core.kernel_files import Mount, parse_mounts, read_text

_NAME = "space"
_LIMIT_S = 3.0
_FULL = Threshold(1 / 64, "16 MiB: less and not even logs can be written")
_ACTION = "delete old checkpoints (phalanx checkpoint prune) or choose another disk"


def run(host: Host) -> CheckResult:
    """Ask for free bytes and files where the checkpoints go, else where TMPDIR says, else in the present folder."""
    if "://" in host.folder:
        return skipped(_NAME, "checkpoints go to an object store")
    folder = Path(
        host.folder or host.environment.get("TMPDIR") or "."
    ).absolute()  # not resolve(): that would touch the disk
    mount = mount_of(str(folder), read_text(host.proc / "self/mountinfo") or "")
    if mount and "ro" in mount.options:
        return failed(_NAME, f"{mount.point} is mounted read-only", "look for disk errors: dmesg; then remount it")
    bytes_text = _ask(host, folder, "-Pk")
    if bytes_text is None:
        return failed(_NAME, f"df gave no answer about {folder} within {_LIMIT_S:g} s", "check its disk or server")
    free_gib = (parse_df(bytes_text) or (0, 0))[1] / 2**20
    files = parse_df(_ask(host, folder, "-Pi") or "")
    if files and files[0] and not files[1]:
        return failed(_NAME, f"{folder}: no file can be made, all inodes are taken", _ACTION)
    return hold(_NAME, free_gib, "GiB free", given_threshold(host, _NAME) or _FULL, _ACTION)


def _ask(host: Host, folder: Path, option: str) -> str | None:
    for parent in (folder, *folder.parents):
        answer = host.run(["df", option, str(parent)], _LIMIT_S)
        if answer is not None or os.path.lexists(parent):
            return answer
    return None


def parse_df(text: str) -> tuple[int, int] | None:
    """All and free, of ``df -P``; None where it does not say (file systems that make inodes as they need them)."""
    words = (text.strip().splitlines() or [""])[-1].split()
    try:
        return int(words[-5]), int(words[-3])
    except (ValueError, IndexError):
        return None


def mount_of(path: str, mountinfo: str) -> Mount | None:
    """The last mount that `path` lies in."""
    best: Mount | None = None
    for mount in parse_mounts(mountinfo):
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


CHECK = Check(_NAME, "room for checkpoints on a disk that can be written", "passive", run, limit_s=8.0)
