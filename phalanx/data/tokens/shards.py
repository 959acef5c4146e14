"""Token shards on disk: one-dimensional ``.npy`` files written as a stream and read through memory maps."""

from __future__ import annotations

import hashlib
import io
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from phalanx.core.errors import UserError
from phalanx.core.files import atomic_writer

_HEADER_BYTES = 128


@dataclass(frozen=True)
class Shard:
    """A run of tokens of one split.

    `tokens` is a ``.npy`` file, or any file whose ids of type `dtype` start at byte `offset_bytes`. `starts` holds the
    positions within the shard at which a document begins (int64, ascending); `mask` is 1 where a token is trained on.
    """

    tokens: Path
    dtype: str
    offset_bytes: int
    num_tokens: int
    starts: Path | None = None
    starts_begin: int = 0
    starts_end: int = 0
    starts_shift: int = 0
    mask: Path | None = None


class NpyWriter:
    """Appends to a one-dimensional ``.npy`` file whose length is known only at the end; `digest` is of the values."""

    def __init__(self, file: BinaryIO, dtype: DTypeLike) -> None:
        self.count = 0
        self._file = file
        self._dtype = np.dtype(dtype)
        self._hash = hashlib.blake2b(digest_size=16)
        file.write(self._header())

    def append(self, values: NDArray[Any]) -> None:
        """Write `values`, cast to the file's type (which must hold them)."""
        block = np.ascontiguousarray(values, self._dtype).tobytes()
        self._file.write(block)
        self._hash.update(block)
        self.count += len(values)

    @property
    def digest(self) -> str:
        """BLAKE2b of the values written so far."""
        return self._hash.hexdigest()

    def finish(self) -> None:
        """Put the length into the header."""
        self._file.seek(0)
        self._file.write(self._header())

    def _header(self) -> bytes:
        buffer = io.BytesIO()
        entry = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(buffer, entry)
        header = buffer.getvalue()
        assert len(header) == _HEADER_BYTES, "numpy pads a header of one dimension to 128 bytes"
        return header


@contextmanager
def npy_writer(path: Path, dtype: DTypeLike) -> Iterator[NpyWriter]:
    """A `NpyWriter` whose file takes the name `path` only when the block ends without an error."""
    with atomic_writer(path) as file:
        writer = NpyWriter(file, dtype)
        yield writer
        writer.finish()


class Mapped:
    """A file's values as a read-only array that is not in memory until it is touched, and can be let go again."""

    def __init__(self, path: Path, dtype: DTypeLike, offset_bytes: int, count: int) -> None:
        needed = offset_bytes + count * np.dtype(dtype).itemsize
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise _damaged(path, str(error)) from None
        if len(self._map) < needed:
            raise _damaged(path, f"it has {len(self._map)} bytes, {needed} are needed")
        self.array: NDArray[Any] = np.frombuffer(self._map, dtype, count, offset_bytes)

    def release(self) -> None:
        """Give the pages back to the system (they stay in its cache); the array stays valid."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def map_npy(path: Path) -> Mapped:
    """Map a one-dimensional ``.npy`` file.

    Raises:
        UserError: it is missing, cut short or no such file.
    """
    try:
        with path.open("rb") as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    if len(shape) != 1 or dtype.hasobject:
        raise _damaged(path, f"it holds {dtype} of shape {shape}")
    return Mapped(path, dtype, offset, shape[0])


def _damaged(path: Path, why: str) -> UserError:
    return UserError(
        f"a prepared file is missing or damaged ({why})",
        cure="delete its folder and run `phalanx data prepare` again",
        value=str(path),
    )
