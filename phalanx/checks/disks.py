"""Where checkpoints go: room, speed, and a probe that is written, read and deleted, in a folder or an object store."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
import time
from pathlib import Path

from phalanx.checks.check_host import Check, CheckResult, Host, failed, passed, skipped
from phalanx.checks.pairwise_tests import Threshold
from phalanx.checks.thresholds import OtherWork, given_threshold, hold, judge
from phalanx.core.host import Mount, parse_mounts, read_text

_SPACE_NAME = "space"
_LIMIT_S = 3.0
_FULL = Threshold(1 / 64, "16 MiB: less and not even logs can be written")
_SPACE_ACTION = "delete old checkpoints (phalanx checkpoint prune) or choose another disk"


def check_space(host: Host) -> CheckResult:
    """Ask for free bytes and files where the checkpoints go, else where TMPDIR says, else in the present folder."""
    if "://" in host.folder:
        return skipped(_SPACE_NAME, "checkpoints go to an object store")
    # Not resolve(): that would touch the disk.
    folder = Path(host.folder or host.environment.get("TMPDIR") or ".").absolute()
    mount = mount_of(str(folder), read_text(host.proc / "self/mountinfo") or "")
    if mount and "ro" in mount.options:
        reason = f"{mount.point} is mounted read-only"
        return failed(_SPACE_NAME, reason, "look for disk errors: dmesg; then remount it")
    bytes_text = _ask(host, folder, "-Pk")
    if bytes_text is None:
        reason = f"df gave no answer about {folder} within {_LIMIT_S:g} s"
        return failed(_SPACE_NAME, reason, "check its disk or server")
    free_gib = (parse_df(bytes_text) or (0, 0))[1] / 2**20
    files = parse_df(_ask(host, folder, "-Pi") or "")
    if files and files[0] and not files[1]:
        return failed(_SPACE_NAME, f"{folder}: no file can be made, all inodes are taken", _SPACE_ACTION)
    return hold(_SPACE_NAME, free_gib, "GiB free", given_threshold(host, _SPACE_NAME) or _FULL, _SPACE_ACTION)


def _ask(host: Host, folder: Path, option: str) -> str | None:
    # df is asked in a process of its own: a file system whose server is gone lets nobody go.
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


SPACE = Check(_SPACE_NAME, "room for checkpoints on a disk that can be written", "passive", check_space, limit_s=8.0)


_DISK_NAME = "disk"
_BLOCK = 4 << 20
_MOST_BYTES = 256 << 20
_BUDGET_S = 0.7
_DISK_ACTION = "look for disk errors (dmesg, smartctl -a) and other writers (iostat -x)"


def check_disk(host: Host) -> CheckResult:
    """Write where the checkpoints go, else where temporary files do."""
    if "://" in host.folder:
        return skipped(_DISK_NAME, "checkpoints go to an object store; see storage")
    folder = existing(Path(host.folder or host.environment.get("TMPDIR") or tempfile.gettempdir()).absolute())
    try:
        with OtherWork(host.proc) as other:
            written, write_s, read_s = measure(folder)
    except OSError as error:
        return failed(_DISK_NAME, f"{folder}: {error.strerror or error}", "free space, or check the disk: dmesg, df")
    rate = written / write_s / 1e6
    result = judge(host, _DISK_NAME, rate, "MB/s", action=_DISK_ACTION, hardware=str(folder), other=other)
    return result.explained(result.reason, f"written to {folder}; read at {written / read_s / 1e6:.0f} MB/s")


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


DISK = Check(
    _DISK_NAME,
    "how fast the checkpoints' disk is written and read",
    "quick",
    check_disk,
    30.0,
    isolated=True,
    uses=frozenset({"disk"}),
)


_STORAGE_NAME = "storage"


def check_storage(host: Host) -> CheckResult:
    """Write, read and delete a small object below the given folder, which is made only where the host says so."""
    setting = "run.checkpoints" if host.makes_folder else "--folder"
    if not host.folder:
        return skipped(_STORAGE_NAME, f"no folder of checkpoints given ({setting})")
    import fsspec

    name = f".phalanx-check-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    content = secrets.token_bytes(1024)
    began_s = time.perf_counter()
    try:
        system, path = fsspec.core.url_to_fs(host.folder)
        is_folder = "://" not in host.folder
        if is_folder and host.makes_folder:
            system.makedirs(path, exist_ok=True)
        if not path or (is_folder and not system.isdir(path)):
            return failed(_STORAGE_NAME, f"{host.folder} is not there", f"make it, or give another {setting}")
        problem = _probe(system, f"{path.rstrip('/')}/{name}", content)
    except Exception as error:  # every store has its own kinds of errors
        problem = f"{type(error).__name__}: {error}"
    if problem:
        return failed(_STORAGE_NAME, f"{host.folder}: {problem}", "check address, credentials, quota and network")
    return passed(_STORAGE_NAME, host.folder, value=(time.perf_counter() - began_s) * 1000, unit="ms")


def _probe(system: object, path: str, content: bytes) -> str:
    try:
        system.pipe_file(path, content)  # type: ignore[attr-defined]
        read = system.cat_file(path)  # type: ignore[attr-defined]
        return "" if read == content else "what was read back is not what was written"
    finally:
        if system.exists(path):  # type: ignore[attr-defined]
            system.rm_file(path)  # type: ignore[attr-defined]


STORAGE = Check(
    _STORAGE_NAME,
    "a probe can be written, read and deleted where checkpoints go",
    "quick",
    check_storage,
    30.0,
    isolated=True,
)
