"""Where ranks write. Rank 0 keeps the terminal, as a single process would have it, so that a live display works.

The others' stdout and stderr together go to the launcher's stderr line by line, each line under the mark of its rank,
or into a file per rank where a folder is given. Torch-free.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol, TextIO

_BLOCK_BYTES = 1 << 16
_LAST_LINES = 20


class Output(Protocol):
    """What the ranks but the first write, as the launcher holds it."""

    descriptors: dict[int, int]
    """Rank -> the descriptor that is to be its stdout and stderr; closed by `started`."""

    def started(self) -> None:
        """The template has the descriptors now."""

    def sources(self) -> list[int]:
        """Descriptors to wait for."""

    def read(self, ready: Collection[Any]) -> None:
        """Take what has come from those of `sources` that are ready."""

    def last_lines(self, rank: int) -> list[str]:
        """The last lines that a rank wrote; empty where they are not known."""

    def close(self) -> None:
        """Show the rest."""


class _Descriptors:
    """Descriptors that are passed on to the template and then closed here."""

    def __init__(self) -> None:
        self.descriptors: dict[int, int] = {}

    def started(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()


class MarkedOutput(_Descriptors):
    """Every line of rank 3 becomes ``[rank 3] …`` on `stream`."""

    def __init__(self, ranks: Iterable[int], stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._ranks: dict[int, int] = {}
        self._partial: dict[int, bytes] = {}
        self._last: dict[int, deque[str]] = {}
        for rank in ranks:
            ours, self.descriptors[rank] = os.pipe()
            self._ranks[ours], self._partial[rank], self._last[rank] = rank, b"", deque(maxlen=_LAST_LINES)

    def sources(self) -> list[int]:
        """The pipes that are still open."""
        return list(self._ranks)

    def read(self, ready: Collection[Any]) -> None:
        """Show the lines that have come whole."""
        for descriptor in [source for source in self._ranks if source in ready]:
            if block := os.read(descriptor, _BLOCK_BYTES):
                self._show(self._ranks[descriptor], block)
            else:
                self._finish(descriptor)

    def last_lines(self, rank: int) -> list[str]:
        """Up to 20 lines, without their marks."""
        return list(self._last.get(rank, ()))

    def close(self) -> None:
        """Show what is left, lines that have no end too."""
        self.started()
        for descriptor in list(self._ranks):
            self._finish(descriptor)

    def _show(self, rank: int, block: bytes) -> None:
        *lines, self._partial[rank] = (self._partial[rank] + block).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace").rsplit("\r", 1)[-1]  # of a line drawn over and over, the last state
            self._last[rank].append(text)
            self._stream.write(f"[rank {rank}] {text}\n")
        if lines:
            self._stream.flush()

    def _finish(self, descriptor: int) -> None:
        rank = self._ranks.pop(descriptor)
        if self._partial[rank]:
            self._show(rank, b"\n")
        os.close(descriptor)


class FileOutput(_Descriptors):
    """Rank 3 appends to ``rank-3.log`` in `folder`."""

    def __init__(self, ranks: Iterable[int], folder: Path) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self._paths = {rank: folder / f"rank-{rank}.log" for rank in ranks}
        for rank, path in self._paths.items():
            self.descriptors[rank] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def sources(self) -> list[int]:
        """None: the ranks write to their files themselves."""
        return []

    def read(self, ready: Collection[Any]) -> None:
        """Nothing comes this way."""

    def last_lines(self, rank: int) -> list[str]:
        """Up to 20 lines, of this start or an earlier one."""
        if rank not in self._paths:
            return []
        with self._paths[rank].open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _BLOCK_BYTES, 0))
            return file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]

    def close(self) -> None:
        """Let go of the files, if the template never had them."""
        self.started()
