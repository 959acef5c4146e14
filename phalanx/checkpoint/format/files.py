"""The files of one checkpoint, wherever they lie, for reading. Torch-free."""

from __future__ import annotations

import errno
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol


class Files(Protocol):
    """The files of one checkpoint. Refusals are `OSError`s."""

    @property
    def name(self) -> str:
        """Of the checkpoint: the last part of `url`."""
        ...

    @property
    def url(self) -> str:
        """Where it lies, for people."""
        ...

    def identity(self) -> str:
        """Tells it from another that later bears its name; empty if it is gone."""
        ...

    def read(self, file: str) -> bytes:
        """A small file."""
        ...

    def open(self, file: str) -> BinaryIO:
        """A file for reading anywhere in it (`seek`, `readinto`)."""
        ...

    def size_bytes(self, file: str) -> int:
        """Length of a file; FileNotFoundError: it is not there, IsADirectoryError: it is no file."""
        ...


@dataclass(frozen=True)
class FolderFiles:
    """Those in the folder at `path`."""

    path: Path

    @property
    def name(self) -> str:
        """See `Files`."""
        return self.path.name

    @property
    def url(self) -> str:
        """See `Files`."""
        return str(self.path)

    def identity(self) -> str:
        """See `Files`."""
        try:
            status = self.path.stat()
        except OSError:
            return ""
        return f"{status.st_ino}-{status.st_ctime_ns}"

    def read(self, file: str) -> bytes:
        """See `Files`."""
        return (self.path / file).read_bytes()

    def open(self, file: str) -> BinaryIO:
        """See `Files`."""
        return (self.path / file).open("rb")

    def size_bytes(self, file: str) -> int:
        """See `Files`."""
        path = self.path / file
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "Is not a file", str(path))
        return status.st_size


def files_of(place: Path | Files) -> Files:
    """The files of the checkpoint in a folder, or as given."""
    return FolderFiles(place) if isinstance(place, Path) else place
