"""Sums of runs: of the elements in a slot, which a record has, and of a file, which the manifest has.

A file of a checkpoint is summed in runs of at most `RUN_BYTES`; a new one begins with every archive. So a reader of
part of it checks what it reads, and reads nothing twice. Where the runs lie follows from the places of the archives,
which the manifest has; the sums (XXH3-64, hexadecimal, in order) are in the file's entry there. SHA-256 of whole files,
which names their contents beyond doubt, can only be checked by reading all of a file.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import BinaryIO, cast

import xxhash
from typing_extensions import Buffer
from xxhash import xxh3_64_intdigest

from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Record, ShardPlan


def chunk_sums(memory: Buffer, data_bytes: int) -> tuple[int, ...]:
    """XXH3-64 of every `CHUNK_BYTES` of the first `data_bytes` of `memory`; the last run may be shorter.

    Raises:
        ValueError: the memory is shorter.
    """
    return tuple(_sums(memory, data_bytes))


def first_fault(memory: Buffer, record: Record, plan: ShardPlan | None = None) -> str | None:
    """What is wrong with a copy, or None where every sum of its record is right.

    Args:
        memory: the slot's, or a copy of it, from its first byte.
        plan: to name a tensor that lies where the sums differ.
    """
    with memoryview(memory) as whole, whole.cast("B") as view:
        fault = record_fault(record, view.nbytes, plan)
        if fault is not None:
            return fault
        for number in range(len(record.sums)):
            start = number * CHUNK_BYTES
            with view[start : min(start + CHUNK_BYTES, record.data_bytes)] as chunk:
                fault = chunk_fault(chunk, number, record, plan)
            if fault is not None:
                return fault
    return None


def record_fault(record: Record, length_bytes: int, plan: ShardPlan | None = None) -> str | None:
    """What is wrong with a record before any element is looked at, or with memory of this length; None where nothing
    is."""
    if plan is not None and plan.sha256 != record.plan_sha256:
        return f"the record of step {record.step}, rank {record.rank} belongs to another plan"
    state = _state_fault(record)
    if state is not None:
        return state
    if length_bytes < record.data_bytes:
        return f"{length_bytes} bytes are there of {record.data_bytes}"
    expected = -(-record.data_bytes // CHUNK_BYTES)
    if len(record.sums) != expected:
        return f"the record has {len(record.sums)} sums where {record.data_bytes} bytes have {expected}"
    return None


def chunk_fault(chunk: Buffer, number: int, record: Record, plan: ShardPlan | None = None) -> str | None:
    """What is wrong with the run of this number of the elements, or None."""
    found = xxh3_64_intdigest(chunk)
    return None if found == record.sums[number] else _describe(number, found, record, plan)


def state_sum(state: str) -> int:
    """XXH3-64 of the state that a record carries."""
    return xxh3_64_intdigest(state.encode())


def _sums(memory: Buffer, data_bytes: int) -> Iterator[int]:
    with memoryview(memory) as whole, whole.cast("B") as view:
        if view.nbytes < data_bytes:
            raise ValueError(f"{view.nbytes} bytes of memory where {data_bytes} are to be summed")
        for start in range(0, data_bytes, CHUNK_BYTES):
            with view[start : min(start + CHUNK_BYTES, data_bytes)] as chunk:
                yield xxh3_64_intdigest(chunk)


def _state_fault(record: Record) -> str | None:
    found = state_sum(record.state)
    if (not record.state and not record.state_sum) or found == record.state_sum:
        return None
    return f"the state of step {record.step}, rank {record.rank} has the sum {found:016x}, not {record.state_sum:016x}"


def _describe(number: int, found: int, record: Record, plan: ShardPlan | None) -> str:
    start = number * CHUNK_BYTES
    stop = min(start + CHUNK_BYTES, record.data_bytes)
    where = f"chunk {number} (bytes {start} to {stop}) of step {record.step}, rank {record.rank}"
    names = [] if plan is None else _tensors(plan, start, stop)
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        where += f", which holds {names[0]}{more}"
    return f"{where}, has the sum {found:016x}, not {record.sums[number]:016x}"


def _tensors(plan: ShardPlan, start: int, stop: int) -> list[str]:
    return [
        piece.name
        for piece in plan.pieces
        if piece.length_bytes and piece.start_bytes < stop and start < piece.start_bytes + piece.length_bytes
    ]


RUN_BYTES = 4 << 20
_KEPT_RUNS = 3  # of an archive: its first and last run, which say where the elements are, and the one being read


class BadSumError(ValueError):
    """What was read is not what was written."""


def run_starts(archives: Iterable[int], size_bytes: int) -> list[int]:
    """Where the runs of a file of `size_bytes` begin whose archives begin at `archives`."""
    borders = sorted({0, *archives, size_bytes})
    return [start for begin, end in pairwise(borders) for start in range(begin, end, RUN_BYTES)]


class RunSums:
    """Takes the sums of a file while it is written: `cut` before each archive, `update` with all that is written."""

    def __init__(self) -> None:
        self._sums: list[str] = []
        self._run, self._length = xxhash.xxh3_64(), 0

    def cut(self) -> None:
        """A new run begins here."""
        if self._length:
            self._sums.append(self._run.hexdigest())
            self._run, self._length = xxhash.xxh3_64(), 0

    def update(self, data: Buffer) -> None:
        """What is written next."""
        view = memoryview(data).cast("B")
        while view:
            part = view[: RUN_BYTES - self._length]
            self._run.update(part)
            self._length += part.nbytes
            view = view[part.nbytes :]
            if self._length == RUN_BYTES:
                self.cut()

    def finish(self) -> list[str]:
        """The sums of all that was written."""
        self.cut()
        return self._sums


class CheckedFile(io.RawIOBase):
    """A file of which nothing is believed that has not the right sum; whole runs go straight to where they are wanted.

    What `readinto` gave is good when it returns; when it raises, what it wrote is not.

    Args:
        raw: where the bytes come from.
        starts: where the runs begin, the first at 0.
        size_bytes: of the file.
        sums: of the runs; fewer or more than `starts` are refused.
        describe: what to say of a run (its number, the sum found) that is not what was written.
    """

    def __init__(
        self,
        raw: BinaryIO,
        starts: Sequence[int],
        size_bytes: int,
        sums: Sequence[int],
        describe: Callable[[int, int], str],
    ) -> None:
        if len(sums) != len(starts):
            raise BadSumError(f"there are {len(sums)} sums of {len(starts)} runs")
        self._raw, self._starts, self._ends = cast(io.BufferedReader, raw), starts, [*starts[1:], size_bytes]
        self._size_bytes, self._sums, self._describe = size_bytes, sums, describe
        self._kept: OrderedDict[int, memoryview] = OrderedDict()
        self._at = 0
        self.bytes_read = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        return self._at

    def tell(self) -> int:
        """As of any file."""
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        """Fill `buffer`, or as much of it as there is.

        Raises:
            BadSumError: a run is not what was written. OSError: it cannot be read.
        """
        target = memoryview(buffer).cast("B")
        target = target[: max(0, self._size_bytes - self._at)]
        count = target.nbytes
        while target:
            done = self._read_some(target)
            target = target[done:]
            self._at += done
        return count

    def _read_some(self, target: memoryview) -> int:
        number = bisect_right(self._starts, self._at) - 1
        start, end = self._starts[number], self._ends[number]
        if start == self._at and end - start <= target.nbytes and number not in self._kept:
            self._read_run(number, target[: end - start])
            return end - start
        part = self._kept_run(number)[self._at - start :][: target.nbytes]
        target[: part.nbytes] = part
        return part.nbytes

    def _kept_run(self, number: int) -> memoryview:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        run = memoryview(bytearray(self._ends[number] - self._starts[number]))
        self._read_run(number, run)
        self._kept[number] = run
        if len(self._kept) > _KEPT_RUNS:
            self._kept.popitem(last=False)
        return run

    def _read_run(self, number: int, target: memoryview) -> None:
        self._raw.seek(self._starts[number])
        left = target
        while left:
            count = self._raw.readinto(left)
            if not count:
                raise BadSumError("it ends too early")
            left = left[count:]
        self.bytes_read += target.nbytes
        found = xxhash.xxh3_64_intdigest(target)
        if found != self._sums[number]:
            raise BadSumError(self._describe(number, found))
