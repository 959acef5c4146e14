"""A ring of slots in shared memory: which step is written next, which readers use it (pure), and the arrays in a slot.

A slot is a segment of `phalanx.ipc.shared_memory`.

Shape letters: B samples, S positions, L = S + 1 tokens.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.data.samples import Arrays
from phalanx.ipc.shared_memory import Segment


class DisagreementError(ValueError):
    """A reader asked for something other than the readers it shares its batches with."""


@dataclass
class SlotRing:
    """The slots of one stream of one data-parallel index, and the readers that share them.

    A reader that wants step s has released step ``s - ahead``, which had the same slot. So step s is written as soon as
    one reader wants it and all that will ever read this ring have released what lies there; those are `expected`
    readers, also while some of them have not come yet. A reader that has left holds nothing any more.
    """

    index: int  # the data-parallel rank whose samples these are, among `ranks`
    ranks: int
    ahead: int  # slots
    expected: int  # readers that this host has for `index`
    written: int = 0  # steps
    _joined: int = 0
    _wanted: dict[int, int] = field(default_factory=dict)
    _plan: dict[int, tuple[int, int]] = field(default_factory=dict)

    def join(self, reader: int) -> None:
        """`reader` shares this ring from now on; DisagreementError: more readers come than are expected."""
        if self._joined == self.expected:
            known = f"the loader was told of {self.expected} readers of data-parallel index {self.index} on this host"
            raise DisagreementError(f"{known}, and one more came")
        self._joined += 1
        self._wanted[reader] = 0

    def leave(self, reader: int) -> None:
        """`reader` is gone, and holds nothing any more."""
        self._wanted.pop(reader, None)

    @property
    def is_over(self) -> bool:
        """Whether all readers have come and gone."""
        return self._joined == self.expected and not self._wanted

    def want(self, reader: int, step: int, start: int, count: int) -> bool:
        """`reader` wants samples ``start..start+count`` as `step`; returns whether they have been written already.
        DisagreementError: another reader wanted other samples as this step."""
        if step != self._wanted[reader]:
            raise DisagreementError(f"step {step} was asked for, step {self._wanted[reader]} was expected")
        asked = self._plan.setdefault(step, (start, count))
        if asked != (start, count):
            others, mine = (f"{s} to {s + n}" for s, n in (asked, (start, count)))
            who = f"ranks that share the batches of data-parallel index {self.index}"
            raise DisagreementError(f"{who} disagree on step {step}: one asks for samples {mine}, another for {others}")
        self._wanted[reader] += 1
        return step < self.written

    def due(self) -> tuple[int, int, int] | None:
        """(step, start, count) of the step that is to be written now; None while there is none."""
        step = self.written
        if not self.wanting(step):
            return None
        all_released = self._joined == self.expected and all(wanted > step for wanted in self._wanted.values())
        return (step, *self._plan[step]) if step < self.ahead or all_released else None

    def wanting(self, step: int) -> list[int]:
        """The readers that have asked for `step`, and have not left."""
        return [reader for reader, wanted in self._wanted.items() if wanted > step]

    def wrote(self) -> None:
        """The step that was due is in its slot now."""
        self._plan.pop(self.written - self.ahead, None)
        self.written += 1


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


class WriterSlot(Segment):
    """The loader's side of a slot, which grows with the batch."""

    def write(self, fields: Sequence[Field], size_bytes: int, arrays: Arrays) -> None:
        """Put `arrays` where `fields` say; OSError: there is not enough memory."""
        memory = self.grow(size_bytes)
        present = [array for array in arrays if array is not None]
        for described, array in zip(fields, present, strict=True):
            np.copyto(_view(memory, described), array, casting="no")


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
        """Close it."""
        if self._memory is not None:
            self._memory.close()
        os.close(self._descriptor)


def _view(memory: mmap.mmap | memoryview, field: Field) -> NDArray[Any]:
    count = math.prod(field.shape)
    return np.frombuffer(memory, field.dtype, count, field.offset_bytes).reshape(field.shape)
