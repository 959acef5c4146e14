"""Storage of the checkpoints: a probe is written, read and deleted where they go, a folder or an object store."""

from __future__ import annotations

import os
import secrets
import socket
import time

from phalanx.checks.contract import Check
from phalanx.checks.host import Host
from phalanx.checks.result import CheckResult, failed, passed, skipped

_NAME = "storage"


def run(host: Host) -> CheckResult:
    """Write, read and delete a small object below the given folder, which is made only where the host says so."""
    setting = "run.checkpoints" if host.makes_folder else "--folder"
    if not host.folder:
        return skipped(_NAME, f"no folder of checkpoints given ({setting})")
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
            return failed(_NAME, f"{host.folder} is not there", f"make it, or give another {setting}")
        problem = _probe(system, f"{path.rstrip('/')}/{name}", content)
    except Exception as error:  # every store has its own kinds of errors
        problem = f"{type(error).__name__}: {error}"
    if problem:
        return failed(_NAME, f"{host.folder}: {problem}", "check address, credentials, quota and network")
    return passed(_NAME, host.folder, value=(time.perf_counter() - began_s) * 1000, unit="ms")


def _probe(system: object, path: str, content: bytes) -> str:
    try:
        system.pipe_file(path, content)  # type: ignore[attr-defined]
        read = system.cat_file(path)  # type: ignore[attr-defined]
        return "" if read == content else "what was read back is not what was written"
    finally:
        if system.exists(path):  # type: ignore[attr-defined]
            system.rm_file(path)  # type: ignore[attr-defined]


CHECK = Check(_NAME, "a probe can be written, read and deleted where checkpoints go", "quick", run, 30.0, isolated=True)
