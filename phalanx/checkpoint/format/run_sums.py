"""Sums of runs: of the elements in a slot, which a record has, and of a file, which the manifest has.

A file of a checkpoint is summed in runs of at most `RUN_BYTES`; a new one begins with every archive. So a reader of
part of it checks what it reads, and reads nothing twice. Where the runs lie follows from the places of the archives,
which the manifest has; the sums (XXH3-64, hexadecimal, in order) are in the file's entry there. SHA-256 of whole files,
which names their contents beyond doubt, can only be checked by reading all of a file.
"""

from __future__ import annotations

import errno
import io
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import BinaryIO, cast

import xxhash
from typing_extensions import Buffer
from xxhash import xxh3_64_intdigest

from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Record, ShardPlan


def first_fault(memory: Buffer, record: Record, plan: ShardPlan | None = None) -> str | None:
    """What is wrong with a copy, from its first byte on, or None where every sum of its record is right; with a plan,
    naming a tensor that lies where the sums differ."""
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
    """What is wrong with a record before any element is looked at, or with memory of this length, or None."""
    who = f"of step {record.step}, rank {record.rank}"
    if plan is not None and plan.sha256 != record.plan_sha256:
        return f"the record {who} belongs to another plan"
    found = state_sum(record.state)
    if (record.state or record.state_sum) and found != record.state_sum:
        return f"the state {who} has the sum {found:016x}, not {record.state_sum:016x}"
    if length_bytes < record.data_bytes:
        return f"{length_bytes} bytes are there of {record.data_bytes}"
    expected = -(-record.data_bytes // CHUNK_BYTES)
    if len(record.sums) != expected:
        return f"the record has {len(record.sums)} sums where {record.data_bytes} bytes have {expected}"
    return None


def chunk_fault(chunk: Buffer, number: int, record: Record, plan: ShardPlan | None = None) -> str | None:
    """What is wrong with the run of this number of the elements, or None."""
    found = xxh3_64_intdigest(chunk)
    if found == record.sums[number]:
        return None
    start = number * CHUNK_BYTES
    stop = min(start + CHUNK_BYTES, record.data_bytes)
    where = f"chunk {number} (bytes {start} to {stop}) of step {record.step}, rank {record.rank}"
    names = [
        piece.name
        for piece in (plan.pieces if plan is not None else ())
        if piece.length_bytes and piece.start_bytes < stop and start < piece.start_bytes + piece.length_bytes
    ]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        where += f", which holds {names[0]}{more}"
    return f"{where}, has the sum {found:016x}, not {record.sums[number]:016x}"


def state_sum(state: str) -> int:
    """XXH3-64 of the state that a record carries."""
    return xxh3_64_intdigest(state.encode())


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


class SeekableFile(io.RawIOBase):
    """The place in a file of `size_bytes` that is read anywhere in it; subclasses read from `at` on, and move it."""

    def __init__(self, size_bytes: int, name: str = "") -> None:
        self._size_bytes, self.name, self.at = size_bytes, name, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """As of any file."""
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self._size_bytes}[whence]
        if at < 0:
            raise OSError(errno.EINVAL, "before the beginning", self.name)
        self.at = at
        return at

    def left(self, buffer: Buffer) -> memoryview:
        """As much of `buffer` as the file still has bytes."""
        return memoryview(buffer).cast("B")[: max(0, self._size_bytes - self.at)]


class CheckedFile(SeekableFile):
    """A file whose runs are checked as they are read; whole runs go straight to where they are wanted.

    What `readinto` gave is good when it returns; when it raises, what it wrote is not.

    Args:
        raw: where the bytes come from.
        starts: where the runs begin, the first at 0.
        size_bytes: of the file.
        sums: of the runs; fewer or more than `starts` are refused.
        describe: the message for the run of a number that is not what was written.
    """

    def __init__(
        self,
        raw: BinaryIO,
        starts: Sequence[int],
        size_bytes: int,
        sums: Sequence[int],
        describe: Callable[[int], str],
    ) -> None:
        if len(sums) != len(starts):
            raise BadSumError(f"there are {len(sums)} sums of {len(starts)} runs")
        super().__init__(size_bytes)
        self._raw, self._starts, self._ends = cast(io.BufferedReader, raw), starts, [*starts[1:], size_bytes]
        self._sums, self._describe = sums, describe
        self._kept: OrderedDict[int, memoryview] = OrderedDict()

    def readinto(self, buffer: Buffer) -> int:
        """Fill `buffer`, or as much of it as there is.

        Raises:
            BadSumError: a run is not what was written. OSError: it cannot be read.
        """
        target = self.left(buffer)
        count = target.nbytes
        while target:
            number = bisect_right(self._starts, self.at) - 1
            start, end = self._starts[number], self._ends[number]
            if start == self.at and end - start <= target.nbytes and number not in self._kept:
                done = end - start
                self._read_run(number, target[:done])
            else:
                part = self._kept_run(number)[self.at - start :][: target.nbytes]
                done = part.nbytes
                target[:done] = part
            target = target[done:]
            self.at += done
        return count

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
        if xxhash.xxh3_64_intdigest(target) != self._sums[number]:
            raise BadSumError(self._describe(number))
