"""The files of one checkpoint, wherever they lie, for reading. Torch-free."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from phalanx.core.files import open_regular, read_regular

_MOST_BYTES = {"manifest.json": 4 << 30, "SHA256SUMS": 64 << 20, "evaluation.json": 1 << 20}
_ELSE_BYTES = 1 << 30


def most_bytes(file: str) -> int:
    """How large a file can be that is read as a whole, bytes; what is larger was never written by anybody.

    A manifest has about 150 bytes for each chunk of a tensor: 4 GiB are enough for 2,200 tensors (weights and moments
    of 80 layers) in 10,000 parts each, with the state of training. ``SHA256SUMS`` has at most 330 for each file: 64 MiB
    are 200,000 files, two for each rank. What is left are records of a rank (``part-0.json``): 20 bytes for each run of
    its elements, and rank 0's state.
    """
    return _MOST_BYTES.get(file, _ELSE_BYTES)


class Span(NamedTuple):
    """Bytes ``[start, end)`` of a file."""

    file: str
    start: int
    end: int


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
        """A small file; OddFileError: it is none, or larger than `most_bytes`."""
        ...

    def open(self, file: str) -> BinaryIO:
        """A file for reading anywhere in it (`seek`, `readinto`); OddFileError: it is none."""
        ...

    def size_bytes(self, file: str) -> int:
        """Length of a file; FileNotFoundError: it is not there, IsADirectoryError: it is no file."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """Length of every file, by name, from one look at all of them; empty if there are none."""
        ...

    def ahead(self, spans: Iterable[Span], sizes: Mapping[str, int]) -> AbstractContextManager[Files]:
        """The same files, for reading in one thread, where that makes it faster with `spans` on their way already.

        Args:
            spans: what will be read, best in that order.
            sizes: of files that will be opened, so that storage need not be asked.
        """
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
        return read_regular(self.path / file, most_bytes(file))

    def open(self, file: str) -> BinaryIO:
        """See `Files`."""
        return open_regular(self.path / file)

    def size_bytes(self, file: str) -> int:
        """See `Files`."""
        path = self.path / file
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "Is not a file", str(path))
        return status.st_size

    def sizes(self) -> Mapping[str, int]:
        """See `Files`."""
        found: dict[str, int] = {}
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # renamed since, by a writer
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    def ahead(self, spans: Iterable[Span], sizes: Mapping[str, int]) -> AbstractContextManager[FolderFiles]:
        """See `Files`. The kernel reads ahead."""
        return nullcontext(self)


def files_of(place: Path | Files) -> Files:
    """The files of the checkpoint in a folder, or as given."""
    return FolderFiles(place) if isinstance(place, Path) else place
