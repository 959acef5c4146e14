"""What processes of this user that were killed have left on this host, in memory and among temporary files."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.keeper.keeper_start import clear_left_keepers
from phalanx.run.executor.page_folder import MEMORY, clear_left_pages

_PROGRESS = "phalanx-progress-"
_YOUNG_S = 60.0
"""What is younger may be of a process that is about to use it."""


def clear_left(memory: Path = MEMORY, temporary: Path | None = None, *, kept_s: float = 86_400.0) -> list[Path]:
    """Take it away; what a process uses stays, and so do others' files. Returns what is gone now.

    Args:
        kept_s: for so long the last words of ranks that were killed stay: how far they were.
    """
    temporary = Path(tempfile.gettempdir()) if temporary is None else temporary
    private = [temporary / f"phalanx-{os.geteuid()}"]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        private.append(Path(runtime) / private[0].name)
    gone = [path for base in (memory, temporary) for path in clear_left_pages(base)]
    for folder in private:
        gone += [*clear_left_keepers(folder), *_clear_sockets(folder)]
    return gone + [
        path for base in (memory, temporary) for path in _clear_progress(base / f"{_PROGRESS}{os.getuid()}", kept_s)
    ]


def _clear_sockets(folder: Path) -> Iterator[Path]:
    """Of drivers that live no more."""
    for path in folder.glob("driver-*"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                yield path


def _clear_progress(base: Path, kept_s: float) -> Iterator[Path]:
    """Folders of runs whose ranks are gone."""
    used: set[str] | None = None
    for folder in base.glob("*"):
        with suppress(OSError):
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            age_s = time.time() - found.st_mtime  # by the clock that files have
            if not is_ours or age_s < (kept_s if any(folder.iterdir()) else _YOUNG_S):
                continue
            used = _used_folders() if used is None else used
            if str(folder) not in used:
                shutil.rmtree(folder)
                yield folder


def _used_folders() -> set[str]:
    """Those of which a process has a page."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it is gone, or another user's, who cannot have a page of ours
            text = maps.read_text(errors="replace")
            used.update(re.findall(rf"(/\S*/{_PROGRESS}\d+/[^/\s]+)/", text))
    return used
