"""From copies of shards, in memory or as they come from another host, into tensors; nothing is believed unchecked."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, cast

import numpy as np
from typing_extensions import Buffer
from xxhash import xxh3_64

from phalanx.checkpoint.format.archive import read_rows
from phalanx.checkpoint.format.plan import ShardPlan
from phalanx.checkpoint.format.record import CHUNK_BYTES, Record
from phalanx.checkpoint.format.runs import BadSumError
from phalanx.checkpoint.format.sums import chunk_fault, record_fault
from phalanx.checkpoint.restoring.parts import Part

SHARE_BYTES = 32 << 20
"""Work is divided among threads in pieces of about this size."""

_BLOCK_BYTES = 1 << 18  # stays in the cache of a core


class CheckedCopy(io.RawIOBase):
    """The elements of a copy as a file, to be read from front to back; what `readinto` gave is good when it returns.

    Args:
        chunk: gives the chunk of a number; called with rising numbers.
    """

    def __init__(self, record: Record, plan: ShardPlan, chunk: Callable[[int], Buffer]) -> None:
        self._record, self._plan, self._chunk = record, plan, chunk
        self._at, self._number = 0, -1
        self._current = np.empty(0, np.uint8)

    def seekable(self) -> bool:
        """It is."""
        return True

    def readable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """From the beginning only."""
        assert whence == io.SEEK_SET
        self._at = offset
        return offset

    def readinto(self, buffer: Buffer) -> int:
        """Fill `buffer`, or as much of it as there is.

        Raises:
            BadSumError: naming chunk and tensors.
        """
        target = np.frombuffer(memoryview(buffer), np.uint8)[: max(0, self._record.data_bytes - self._at)]
        done = 0
        while done < target.size:
            number, skipped = divmod(self._at, CHUNK_BYTES)
            first, end = chunk_place(number, self._record)
            if not skipped and end - first <= target.size - done and number != self._number:
                count = self._take_whole(number, target[done : done + end - first])
            else:
                self._check(number)
                part = self._current[skipped:][: target.size - done]
                count = part.size
                target[done : done + count] = part  # without Python's lock, other than slices of memoryviews
            done += count
            self._at += count
        return done

    def _take_whole(self, number: int, target: np.ndarray[Any, Any]) -> int:
        """Copy a chunk and take the sum of what has arrived, block by block, while it is in the cache."""
        data, run = np.frombuffer(memoryview(self._chunk(number)), np.uint8), xxh3_64()
        for start in range(0, target.size, _BLOCK_BYTES):
            block = target[start : start + _BLOCK_BYTES]
            block[:] = data[start : start + _BLOCK_BYTES]
            run.update(block.data)
        if run.intdigest() != self._record.sums[number]:
            raise BadSumError(chunk_fault(target.data, number, self._record, self._plan) or f"chunk {number} changes")
        return target.size

    def _check(self, number: int) -> None:
        if number == self._number:
            return
        data = self._chunk(number)
        fault = chunk_fault(data, number, self._record, self._plan)
        if fault is not None:
            raise BadSumError(fault)
        self._current, self._number = np.frombuffer(memoryview(data), np.uint8), number


def fill_from_memory(
    memory: memoryview, record: Record, plan: ShardPlan, wanted: Sequence[Part], threads: int = 1
) -> None:
    """Fill the targets of `wanted`, parts of this shard, from the memory of its slot.

    Args:
        threads: that may work at it.

    Raises:
        BadSumError: it is not what was written.
    """
    require_whole(record, plan, memory.nbytes)

    def work(share: Sequence[Part]) -> None:
        fill(CheckedCopy(record, plan, lambda n: memory[slice(*chunk_place(n, record))]), share)

    each(shares(wanted, threads), work)


def fill(copy: CheckedCopy, wanted: Iterable[Part]) -> None:
    """Fill the targets of `wanted`, in the order of their bytes, from a copy."""
    file = cast(BinaryIO, copy)
    for part in wanted:
        if part.block.sizes:
            read_rows(file, part.block.start_bytes, (part.block.sizes, part.dtype), part.start, part.out)
        else:
            read_rows(file, part.block.start_bytes, ((1,), part.dtype), (0,), part.out.view(1))


def require_whole(record: Record, plan: ShardPlan, length_bytes: int) -> None:
    """Check what a record says of itself: its plan, its state, the number of its sums, the length of the memory.

    Raises:
        BadSumError: it does not hold.
    """
    fault = record_fault(record, length_bytes, plan)
    if fault is None and plan.data_bytes != record.data_bytes:
        fault = f"the record says {record.data_bytes} bytes and its plan {plan.data_bytes}"
    if fault is not None:
        raise BadSumError(fault)


def chunk_place(number: int, record: Record) -> tuple[int, int]:
    """Where a chunk begins and ends."""
    return number * CHUNK_BYTES, min((number + 1) * CHUNK_BYTES, record.data_bytes)


def chunks_of(wanted: Iterable[Part]) -> list[int]:
    """Numbers of the chunks that hold the rows of `wanted`, rising."""
    runs = (part.run for part in wanted if part.out.numel())
    return sorted({n for first, end in runs for n in range(first // CHUNK_BYTES, -(-end // CHUNK_BYTES))})


def shares(wanted: Sequence[Part], threads: int) -> list[list[Part]]:
    """`wanted` in at most `threads` runs of about as many bytes."""
    pieces = [piece for part in wanted for piece in part.split(SHARE_BYTES)]
    limit = sum(piece.nbytes for piece in pieces) / max(1, threads)
    found: list[list[Part]] = []
    done = 0
    for piece in pieces:
        if not found or (done >= limit * len(found) and len(found) < threads):
            found.append([])
        found[-1].append(piece)
        done += piece.nbytes
    return found


def each(parted: Sequence[Sequence[Part]], work: Callable[[Sequence[Part]], None]) -> None:
    """Do `work` on every share, at the same time where there are several; the first error is raised when all ended."""
    if len(parted) < 2:
        for share in parted:
            work(share)
        return
    with ThreadPoolExecutor(len(parted)) as pool:
        for future in [pool.submit(work, share) for share in parted]:
            future.result()


def in_turn(numbers: Sequence[int], chunks: Iterator[memoryview]) -> Callable[[int], memoryview]:
    """For `CheckedCopy`: chunks that come in the order of `numbers`."""
    coming = iter(numbers)

    def chunk(number: int) -> memoryview:
        for next_number, data in zip(coming, chunks, strict=False):
            if next_number == number:
                return data
        raise BadSumError(f"chunk {number} did not come")

    return chunk
