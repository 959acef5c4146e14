"""Files of a cache that are one user's alone: whoever reads them believes only what this user has written.

They are kept in ``$XDG_CACHE_HOME/phalanx/warm``, or where PHALANX_WARM_CACHE says.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "PHALANX_WARM_CACHE"
"""Names the folder; set but empty: nothing is kept."""


def private_folder(environ: Mapping[str, str]) -> Path | None:
    """The folder of the cache; None where none can be made that only this user can write to."""
    home = environ.get("HOME", "")
    base = environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
    named = environ.get(VARIABLE, f"{base}/phalanx/warm" if base else "")
    folder = Path(named)
    return folder if named and folder.is_absolute() and make_private(folder) else None


def this_python() -> tuple[str, ...]:
    """What this interpreter is, as far as what it compiles and imports depends on it."""
    return os.path.realpath(sys.executable), sys.prefix, sys.version, str(sys.flags.optimize)


def digest(*parts: str) -> str:
    """A name for all of them."""
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:40]


def make_private(folder: Path) -> bool:
    """Make a folder, if need be; whether it is a folder of this user that nobody else can write to."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return is_private(folder.lstat(), stat.S_ISDIR)
    except OSError:
        return False


def is_private(found: os.stat_result, is_kind: Any) -> bool:
    """Whether a file or folder is of this kind, this user's, and nobody else's to write to."""
    return bool(is_kind(found.st_mode)) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def read_private(path: Path, most_bytes: int) -> bytes | None:
    """The content of a regular file that only this user can write to; None where it is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not is_private(found, stat.S_ISREG) or found.st_size > most_bytes:
            return None
        with contextlib.suppress(OSError):
            return file.read(most_bytes)
    return None


def write_private(path: Path, data: bytes, *, is_durable: bool = False) -> None:
    """Replace a file by one that is this user's alone whatever the umask, all at once.

    Args:
        is_durable: a power cut leaves the old or the new one; else maybe a part of it.

    Raises:
        OSError: it cannot be written.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def prune(folder: Path, pattern: str, most: int) -> None:
    """Remove what was used longest ago, so that so many are left."""
    with contextlib.suppress(OSError):
        found = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in found[most:]:
            for inner in path.iterdir() if path.is_dir() else ():
                inner.unlink(missing_ok=True)
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
