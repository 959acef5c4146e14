"""Writing files so that a reader, or the next run, never sees half of one."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def fsync_folder(folder: Path) -> None:
    """Make renames and new names inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def current_umask() -> int:
    """The bits that are taken away from the modes of new files and folders; a property of the whole process."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Umask:")), 8)
    except (OSError, StopIteration):  # not Linux: it can only be read by changing it
        umask = os.umask(0o077)
        os.umask(umask)
        return umask


@contextmanager
def atomic_writer(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that takes the place of `path` only when the block ends without an error.

    The file is written beside `path`, fsynced and renamed over it, then the folder is fsynced.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with aside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, durably and all at once."""
    with atomic_writer(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON, durably and all at once."""
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())
