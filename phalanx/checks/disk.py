"""Speed of the disk of the checkpoints: a file is written, forced to the disk, and read past the cache."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

from phalanx.checks.busy import OtherWork
from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed, skipped
from phalanx.checks.thresholds import judge

_NAME = "disk"
_BLOCK = 4 << 20
_MOST_BYTES = 256 << 20
_BUDGET_S = 0.7
_ACTION = "look for disk errors (dmesg, smartctl -a) and other writers (iostat -x)"


def run(host: Host) -> CheckResult:
    """Write where the checkpoints go, else where temporary files do."""
    if "://" in host.folder:
        return skipped(_NAME, "checkpoints go to an object store; see storage")
    folder = existing(Path(host.folder or host.environment.get("TMPDIR") or tempfile.gettempdir()).absolute())
    try:
        with OtherWork(host.proc) as other:
            written, write_s, read_s = measure(folder)
    except OSError as error:
        return failed(_NAME, f"{folder}: {error.strerror or error}", "free space, or check the disk: dmesg, df")
    result = judge(host, _NAME, written / write_s / 1e6, "MB/s", action=_ACTION, hardware=str(folder), other=other)
    told = f"written to {folder}; read at {written / read_s / 1e6:.0f} MB/s"
    return result.explained(result.reason, told)


def measure(folder: Path, budget_s: float = _BUDGET_S) -> tuple[int, float, float]:
    """Bytes written, and the seconds that writing and reading took. Nothing is left there. Raises OSError."""
    block = os.urandom(_BLOCK)  # what could not be compressed away
    handle, name = tempfile.mkstemp(prefix=".phalanx-check-", dir=folder)
    try:
        began_s = time.perf_counter()
        written = 0
        while written < _MOST_BYTES and (not written or time.perf_counter() - began_s < budget_s):
            written += os.write(handle, block)
        os.fsync(handle)
        write_s = time.perf_counter() - began_s
        with contextlib.suppress(OSError, AttributeError):  # not on every system
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(handle, 0, os.SEEK_SET)
        began_s = time.perf_counter()
        while os.read(handle, _BLOCK):
            pass
        return written, write_s, time.perf_counter() - began_s
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above that is there."""
    return next(each for each in (folder, *folder.parents) if each.is_dir())


CHECK = Check(
    _NAME,
    "how fast the checkpoints' disk is written and read",
    "quick",
    run,
    30.0,
    isolated=True,
    uses=frozenset({"disk"}),
)
