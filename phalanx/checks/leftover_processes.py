"""Processes of earlier runs of this user: ranks whose launcher is gone, and processes that hold a GPU without a parent.

A keeper outlives its run on purpose and is not counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.checks.check_host import Check, CheckResult, Host, failed, passed, skipped
from phalanx.core.host import read_text
from phalanx.ipc.processes import parse_stat

_NAME = "leftovers"

_KEEPER = "phalanx keeper"
_ADOPTERS = ("systemd",)  # takes the processes of a user whose parent has ended
_LAUNCHERS = ("python", "torchrun", "phalanx", "accelerate", "deepspeed")  # as process 1 of a container
_RANK_MARKS = (b"\0PHALANX_RANK=", b"\0TORCHELASTIC_RUN_ID=")
_ENDING_S = 3.0
_LOOK_AGAIN_S = 0.1
_GPU_FILE = re.compile(r"/dev/(nvidia\d+|kfd)$")


@dataclass(frozen=True)
class UserProcess:
    """A process of this user.

    Attributes:
        is_rank: its environment says that a launcher started it as a rank.
        gpus: device files that it holds open.
    """

    pid: int
    parent: int
    name: str
    is_rank: bool = False
    gpus: tuple[str, ...] = ()


def run(host: Host) -> CheckResult:
    """Look at all processes of this user."""
    if not host.proc.is_dir():
        return skipped(_NAME, f"no {host.proc}")
    has_gpus = any((host.dev / name).exists() for name in ("nvidiactl", "kfd"))
    first_launches = (read_text(host.proc / "1/comm") or "").startswith(_LAUNCHERS)
    processes = read_processes(host.proc, os.geteuid(), has_gpus=has_gpus)
    known, until_s = {process.pid for process in processes}, time.monotonic() + _ENDING_S
    result = judge_leftovers(processes, os.getpid(), host.own_pids, first_launches=first_launches)
    # Ranks whose launcher has just ended, of a run before or beside this one, end too: a leftover is who stays.
    while result.outcome == "fail" and time.monotonic() < until_s:
        time.sleep(_LOOK_AGAIN_S)
        now = read_processes(host.proc, os.geteuid(), has_gpus=has_gpus)
        processes = [process for process in now if process.pid in known]
        result = judge_leftovers(processes, os.getpid(), host.own_pids, first_launches=first_launches)
    return result


def judge_leftovers(
    processes: Iterable[UserProcess], me: int, own: frozenset[int] = frozenset(), *, first_launches: bool = False
) -> CheckResult:
    """The verdict.

    Args:
        own: processes of the present run; they and what descends from them are no leftovers.
        first_launches: process 1 is not an init but a launcher, as in a container; its children are no orphans.
    """
    found = {process.pid: process for process in processes}
    mine = {me, *own, *_ancestors(found.get(me), found)}
    left: list[str] = []
    notes: list[str] = []
    for process in found.values():
        line = _ancestors(process, found)
        names = [process.name, *(found[pid].name for pid in line if pid in found)]
        if _KEEPER in names or process.pid in mine or (own | {me}) & set(line):
            continue
        orphan = not first_launches and _is_orphan(process, line, found)
        if orphan and (process.is_rank or process.gpus):
            left.append(_described(process))
        elif process.gpus:
            notes.append(_described(process))
    if left:
        action = f"end them: kill -9 {' '.join(each.split()[0] for each in left)}"
        reason = f"left by an earlier run: {', '.join(left)}"
        return failed(_NAME, reason, action, value=len(left), unit="processes")
    note = f"other work of this user: {', '.join(notes)}" if notes else ""
    return passed(_NAME, note, value=0.0, unit="processes")


def _is_orphan(process: UserProcess, line: list[int], found: dict[int, UserProcess]) -> bool:
    """Whether it was adopted by process 1, and no launcher is among its ancestors.

    A rank is not a launcher, nor is what adopts orphans. A process of another user may be one (slurmstepd, a
    container's shim), and what was started from outside of a container has no parent there.
    """
    others = [found[pid] for pid in line if pid in found]
    top = others[-1] if others else process
    known = len(others) == len(line) and top.parent == 1
    return known and all(each.is_rank or each.name in _ADOPTERS for each in others)


def _described(process: UserProcess) -> str:
    return f"{process.pid} ({process.name})" + (f" holds {', '.join(process.gpus)}" if process.gpus else "")


def _ancestors(process: UserProcess | None, found: dict[int, UserProcess]) -> list[int]:
    """Pids of parent, grandparent … as far as they are this user's; without process 1 and what adopts orphans there."""
    line: list[int] = []
    while process is not None and process.parent > 1 and process.parent not in line:
        line.append(process.parent)
        process = found.get(process.parent)
    return line


def read_processes(proc: Path, user: int, *, has_gpus: bool) -> list[UserProcess]:
    """Those of this user, but for threads of the kernel and what ends while it is looked at.

    Args:
        has_gpus: look at their open files, too, which takes most of the time.
    """
    found = []
    with os.scandir(proc) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if not entry.name.isdigit() or entry.stat().st_uid != user:
                    continue
                seen = parse_stat(_bytes(f"{entry.path}/stat"))
                if seen is not None:
                    environment = b"\0" + _bytes(f"{entry.path}/environ")
                    is_rank = any(mark in environment for mark in _RANK_MARKS)
                    gpus = _gpu_files(f"{entry.path}/fd") if has_gpus else ()
                    found.append(UserProcess(seen.pid, seen.parent, seen.name, is_rank, gpus))
    return found


def _bytes(path: str) -> bytes:
    # Not pathlib: there may be thousands of processes, and a tenth of a second for all checks.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _gpu_files(folder: str) -> tuple[str, ...]:
    found = set()
    for name in os.listdir(folder):  # noqa: PTH208 - see _bytes
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115 - see _bytes
            found.update([target] if _GPU_FILE.match(target) else [])
    return tuple(sorted(found))


CHECK = Check(_NAME, "no process of an earlier run is left", "passive", run)
