"""One process at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.core.errors import UserError


@contextmanager
def folder_lock(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Make `folder` and hold its lock; `waiting` is called once when another process has it.

    The lock (flock on the file ``lock``) goes with the process that holds it, however that ends.

    Raises:
        UserError: the folder cannot be made or written to.
    """
    with friendly_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def friendly_os_errors(folder: Path) -> Iterator[None]:
    """Turn what the system says about `folder` into a `UserError` with its cure: a full disk, no right to write."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            cure = "free some space, or set data.folder to another disk; finished shards are kept"
            raise UserError(
                f"the disk is full ({error.strerror})", cure=cure, field="data.folder", value=str(folder)
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
            cure = "set data.folder to a folder you can write to"
            raise UserError(
                f"cannot be written to ({error.strerror})", cure=cure, field="data.folder", value=str(folder)
            ) from None
        raise
