"""What can lie where a file is looked for, and is none: by a mistake, a broken copy, or somebody who means harm."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

HUGE_BYTES = 40 << 30
"""Of a sparse file, which takes no room on disk and all of it in memory."""


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{path.name}")  # a whole path may be too long for an address
    finally:
        os.close(here)


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, HUGE_BYTES)


ODD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "dangling link": (lambda path: path.symlink_to("nowhere"), "a link to nothing"),
    "link to itself": (lambda path: path.symlink_to(path.name), "a link to nothing"),
    "directory": (Path.mkdir, "a directory"),
    "FIFO": (os.mkfifo, "a FIFO"),
    "socket": (_socket, "a socket"),
    "40 GB": (_huge, "42,949,672,960 bytes"),
}
"""By name: what makes it, and some words of what is said of it."""
