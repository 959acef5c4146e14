"""A batch's arrays in shared memory: where each lies, and the memory itself. Torch-free.

A slot is a memfd, memory that has no name: it is handed over a socket, and gone when the last process that has it is.
It grows with the batch; it is never made smaller, so that no reader's map can lose its ground (sealed).

Shape letters: B samples, S positions, L = S + 1 tokens.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.data.samples import Arrays

_ALIGN = 64  # a cache line


class Field(NamedTuple):
    """One array in a slot."""

    offset_bytes: int
    dtype: Any
    shape: tuple[int, ...]


@lru_cache(maxsize=16)
def fields_of(rows: int, length: int, *, documents: bool) -> tuple[list[Field], int]:
    """Where the tokens, weights and documents of `Arrays` lie in a slot, and how many bytes they need."""
    wanted: list[tuple[Any, tuple[int, ...]]] = [(np.int64, (rows, length + 1)), (np.float32, (rows, length))]
    if documents:
        wanted.append((np.int32, (rows, length)))
    fields, end = [], 0
    for dtype, shape in wanted:
        fields.append(Field(end, dtype, shape))
        size = math.prod(shape) * np.dtype(dtype).itemsize
        end += -(-size // _ALIGN) * _ALIGN
    return fields, end


class WriterSlot:
    """The loader's side of a slot. `descriptor` can read and write, `reading` only read: that one is handed out."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.reading = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        self._memory: mmap.mmap | None = None

    def write(self, fields: Sequence[Field], size_bytes: int, arrays: Arrays) -> None:
        """Put `arrays` where `fields` say.

        Raises:
            OSError: the memory cannot be had.
        """
        memory = self._map(size_bytes)
        present = [array for array in arrays if array is not None]
        for field, array in zip(fields, present, strict=True):
            np.copyto(_view(memory, field), array, casting="no")

    def close(self) -> None:
        """Give the memory back; readers that have it keep it."""
        if self._memory is not None:
            self._memory.close()
        os.close(self.reading)
        os.close(self.descriptor)

    def _map(self, size_bytes: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size_bytes:
            # all of it now: memory that is missing is an error here, and would be a SIGBUS in the middle of a copy
            os.posix_fallocate(self.descriptor, 0, size_bytes)
            if self._memory is not None:
                self._memory.close()
            self._memory = mmap.mmap(self.descriptor, size_bytes)
        return self._memory


class ReaderSlot:
    """A reader's side of a slot: takes over `descriptor`, and maps it when there is something in it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: mmap.mmap | None = None

    def view(self, fields: Sequence[Field], size_bytes: int) -> Arrays:
        """The arrays that lie where `fields` say; not to be written to, nor kept longer than the step."""
        if self._memory is None or len(self._memory) < size_bytes:
            if self._memory is not None:
                self._memory.close()
            self._memory = mmap.mmap(self._descriptor, size_bytes, prot=mmap.PROT_READ)
        tokens_BL, weights_BS, *documents = (_view(self._memory, field) for field in fields)
        return Arrays(tokens_BL, weights_BS, documents[0] if documents else None)

    def close(self) -> None:
        """Let go of the memory."""
        if self._memory is not None:
            self._memory.close()
        os.close(self._descriptor)


def _view(memory: mmap.mmap, field: Field) -> NDArray[Any]:
    count = math.prod(field.shape)
    return np.frombuffer(memory, field.dtype, count, field.offset_bytes).reshape(field.shape)
