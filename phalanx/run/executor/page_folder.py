"""The folder of an executor, in memory, where the ranks of its host say how far they are.

Whoever is killed takes nothing away, and memory that nobody uses is memory that training lacks. So each executor holds
a lock in its folder, which the kernel gives back however it ends, and takes away folders whose lock nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.core.files import open_regular

PREFIX = "phalanx-pages-"
MEMORY = Path("/dev/shm")

_OWNER = "owner"


@contextmanager
def page_folder(memory: Path | None = None) -> Iterator[Path]:
    """A new folder for the block, for this user alone; what killed executors of this user have left goes first.

    Args:
        memory: where; None: in memory, or among temporary files where there is none to write to.
    """
    usual = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    base = usual if memory is None else memory
    list(clear_left_pages(base))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    try:
        with (folder / f"{_OWNER}.new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # It is there only when it is held: who looks in between takes the folder for nobody's business.
            (folder / f"{_OWNER}.new").rename(folder / _OWNER)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clear_left_pages(base: Path) -> Iterator[Path]:
    """Take away folders in `base` of this user's executors that live no more; others, and what is odd, stay."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            with open_regular(folder / _OWNER) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                yield folder
