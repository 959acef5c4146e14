"""Sums of runs of a file, so that a reader of part of it checks what it reads, and reads nothing twice. Torch-free.

A file of a checkpoint is summed in runs of at most `RUN_BYTES`; a new one begins with every archive. Where the runs
lie follows from the places of the archives, which the manifest has; the sums (XXH3-64, hexadecimal, in order) are in
the file's entry there. SHA-256 of whole files, which names their contents beyond doubt, can only be checked by
reading all of a file.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import BinaryIO, cast

import xxhash
from typing_extensions import Buffer

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
