"""Writing one shard: its memory is checked against its record on the way, run by run, before any of it is written."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

from typing_extensions import Buffer

from phalanx.checkpoint.format.archive_ends import with_crc32
from phalanx.checkpoint.format.manifest import FileEntry
from phalanx.checkpoint.format.plan import Piece
from phalanx.checkpoint.format.record import CHUNK_BYTES
from phalanx.checkpoint.format.runs import RunSums
from phalanx.checkpoint.format.sums import chunk_fault, record_fault
from phalanx.checkpoint.persist.contract import Task
from phalanx.checkpoint.persist.parts import Part, part_name
from phalanx.checkpoint.storage.base import Store
from phalanx.core.points import Points


class BadMemoryError(ValueError):
    """The memory of a slot is not what its record says; says which shard, run and tensor."""


def write_shard(store: Store, area: str, task: Task, points: Points) -> Part:
    """Write the file of a shard into `area`, then its part. Takes the memory of one run (`CHUNK_BYTES`).

    Raises:
        BadMemoryError: the slot does not hold what its record says.
        OSError: storage refuses.
    """
    part = Part.of(task, _write_file(store, area, task, points))
    points.reach("persist.shard-written", rank=task.plan.rank)
    store.write(area, part_name(part.rank), [part.to_bytes()])
    points.reach("persist.part-written", rank=task.plan.rank)
    return part


def _write_file(store: Store, area: str, task: Task, points: Points) -> FileEntry:
    sums = RunSums()
    file = store.write(area, task.plan.file, _summed(task, sums, points))
    if file.size_bytes != task.plan.file_bytes:
        raise OSError(f"{file.name} has {file.size_bytes} of its {task.plan.file_bytes} bytes")
    return file.model_copy(update={"sums": sums.finish()})


def _summed(task: Task, sums: RunSums, points: Points) -> Iterator[Buffer]:
    """The bytes of the file, with the sums of its runs taken, and a fault point half way."""
    done, half = 0, task.plan.file_bytes // 2
    for begins, data in _content(task):
        if begins:
            sums.cut()
        sums.update(data)
        yield data
        length = memoryview(data).nbytes
        if done <= half < done + length:
            points.reach("persist.shard-half", rank=task.plan.rank)
        done += length


def _content(task: Task) -> Iterator[tuple[bool, Buffer]]:
    """The bytes of the file, and whether an archive begins with these."""
    runs, end = _Runs(task), 0
    for piece, offset in zip(task.plan.pieces, task.plan.offsets, strict=True):
        if offset > end:
            yield False, bytes(offset - end)
        yield True, piece.head
        crc32 = 0
        for elements in runs.of(piece):
            crc32 = zlib.crc32(elements, crc32)
            yield False, elements
        yield False, with_crc32(piece.tail, crc32)
        end = offset + piece.archive_bytes


class _Runs:
    """The memory of a slot, read run by run; what is given out has the sum that the record says.

    Each run is read into memory of its own before it is checked, so that what is written is what was checked, whatever
    happens to the slot meanwhile. It is the same memory for all of them, since the pages of new memory, which the
    kernel fills with zeros first, would take longer than all sums: what was given out is good until the next is asked
    for.

    Raises:
        BadMemoryError: the record does not fit the memory.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._number, self._run = -1, memoryview(b"")
        self._buffer = memoryview(bytearray(min(CHUNK_BYTES, task.record.data_bytes)))
        length_bytes = os.fstat(task.descriptor).st_size
        if task.plan.data_bytes != task.record.data_bytes:
            raise BadMemoryError(f"{self._who()}: {task.record.data_bytes} bytes where {task.plan.data_bytes} belong")
        self._require(record_fault(task.record, length_bytes, task.plan))

    def of(self, piece: Piece) -> Iterator[memoryview]:
        """The elements of a piece, in parts."""
        start, end = piece.start_bytes, piece.start_bytes + piece.length_bytes
        while start < end:
            number, first = divmod(start, CHUNK_BYTES)
            part = self._read(number)[first : first + end - start]
            yield part
            start += part.nbytes

    def _read(self, number: int) -> memoryview:
        if number != self._number:
            start = number * CHUNK_BYTES
            length = min(CHUNK_BYTES, self._task.record.data_bytes - start)
            self._run, self._number = self._buffer[:length], number
            if os.preadv(self._task.descriptor, [self._run], start) != length:
                raise BadMemoryError(f"{self._who()}: the memory ends within run {number}")
            self._require(chunk_fault(self._run, number, self._task.record, self._task.plan))
        return self._run

    def _require(self, fault: str | None) -> None:
        if fault is not None:
            raise BadMemoryError(f"{self._who()}: {fault}")

    def _who(self) -> str:
        return f"the memory of rank {self._task.plan.rank}'s shard was not written"
