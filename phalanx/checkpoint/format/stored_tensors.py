"""Stored tensors piece by piece: numbers that are not finite, ranges, differences, and writing them anew.

However large a tensor is, a few pieces of `PIECE_ELEMENTS` are in memory at a time (and of one chunk as it was written,
where that was not in order). To be written anew (`Recut`: into other files, in another dtype, under other names), a
tensor is cut along its rows into chunks of at most `CHUNK_BYTES`, which are dealt out to the files so that these are
about equally long. At most one chunk is in memory, twice.
"""

from __future__ import annotations

import heapq
import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from phalanx.checkpoint.format.dcp import Block, narrow, read_box, torch_dtype
from phalanx.checkpoint.format.manifest import Chunk, DamagedCheckpointError, TensorEntry, first_line, overlap
from phalanx.checkpoint.format.run_sums import RunSums
from phalanx.core.errors import UserError
from phalanx.core.layout import Shard

PIECE_ELEMENTS = 1 << 20  # elements looked at together
CHUNK_BYTES = 1 << 25  # the largest chunk that is written, and so what a conversion takes of memory, about twice over


class Reader:
    """Blocks of the `tensors` of the checkpoint at `where`; a context manager, which keeps the last file open."""

    def __init__(
        self, where: Path | str, tensors: Mapping[str, TensorEntry], open_file: Callable[[str], BinaryIO]
    ) -> None:
        self.tensors = tensors
        self._where = where
        self._open_file = open_file
        self._last: tuple[str, BinaryIO] | None = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._last is not None:
            self._last[1].close()
            self._last = None

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The block ``[offsets, offsets + sizes)`` of a tensor, in host memory; DamagedCheckpointError: the files are
        not what the table says."""
        entry = self.tensors[name]
        out = torch.empty(tuple(sizes), dtype=torch_dtype(entry.dtype))
        self.fill(name, Block(out, Shard(tuple(entry.shape), tuple(offsets), tuple(sizes))))
        return out

    def fill(self, name: str, block: Block) -> None:
        """Fill the memory of `block` with that block of a tensor; raises what `read` raises."""
        entry = self.tensors[name]
        dtype = torch_dtype(entry.dtype)
        for chunk in entry.chunks:
            shared = overlap(chunk, block.shard)
            if shared is not None:
                start = [o - c for o, c in zip(shared[0], chunk.offsets, strict=True)]
                first = [o - b for o, b in zip(shared[0], block.shard.offsets, strict=True)]
                try:
                    if self._last is None or self._last[0] != chunk.file:
                        self.__exit__(None, None, None)
                        self._last = (chunk.file, self._open_file(chunk.file))
                    out = narrow(block.tensor, first, shared[1])
                    place = (chunk.offset, chunk.length)
                    read_box(self._last[1], place, (chunk.sizes, dtype), start, out)
                except (MemoryError, torch.OutOfMemoryError, UserError):
                    raise
                except Exception as error:  # torch raises many kinds at what is not an archive
                    problem = f"{name} cannot be read ({first_line(error)})"
                    raise DamagedCheckpointError(self._where, problem) from error


def pieces(
    sizes: Sequence[int], limit: int = PIECE_ELEMENTS, at: Sequence[int] | None = None
) -> Iterator[tuple[list[int], list[int]]]:
    """Offsets and sizes of blocks of at most `limit` elements, in order, that make up a block of `sizes` at `at`.

    They are cut along the first dimensions, so that each is one run of bytes of a tensor stored in order.
    """
    origin = list(at) if at is not None else [0] * len(sizes)
    cut = next((d for d in range(len(sizes)) if math.prod(sizes[d + 1 :]) <= limit), 0)
    row = math.prod(sizes[cut + 1 :])
    steps = [1 if d < cut else max(1, limit // max(1, row)) if d == cut else size for d, size in enumerate(sizes)]
    ranges = [range(0, size, max(1, step)) for size, step in zip(sizes, steps, strict=True)]
    for start in itertools.product(*ranges):
        offsets = [o + s for o, s in zip(origin, start, strict=True)]
        yield offsets, [min(step, size - s) for step, size, s in zip(steps, sizes, start, strict=True)]


@dataclass
class TensorHealth:
    """What the numbers of one tensor are like; the range, mean and deviation (of the population) are of those that are
    finite, and None where no number is."""

    elements: int = 0
    not_finite: int = 0
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    _spread: float = field(default=0.0, repr=False)

    @property
    def std(self) -> float | None:
        """Standard deviation."""
        good = self.elements - self.not_finite
        return math.sqrt(max(0.0, self._spread / good)) if good else None

    def add(self, block: Tensor) -> None:
        """Count more numbers in."""
        values = _doubles(block)
        is_finite = values.isfinite()
        finite = values if is_finite.all() else values[is_finite]
        before = self.elements - self.not_finite
        self.elements += values.numel()
        self.not_finite += values.numel() - finite.numel()
        if finite.numel():
            low, high = (float(bound) for bound in finite.aminmax())
            self.minimum = low if self.minimum is None else min(self.minimum, low)
            self.maximum = high if self.maximum is None else max(self.maximum, high)
            # Mean and squared deviations of two sets together (Chan, Golub, LeVeque 1979).
            count, mean = finite.numel(), float(finite.mean())
            apart, total = mean - (self.mean or 0.0), before + count
            self._spread += float((finite - mean).square().sum()) + apart * apart * before * count / total
            self.mean = mean if not before else (self.mean or 0.0) + apart * count / total


@dataclass
class Difference:
    """How two tensors of one shape differ; a number that is not finite is like itself only.

    Attributes:
        elements, differing: how many there are, and in how many places the values are not the same.
        max_abs: the largest difference of finite numbers.
        scale: the largest finite absolute value on the left.
    """

    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    scale: float = 0.0

    @property
    def relative(self) -> float:
        """The largest difference as a share of the largest value on the left, which is not 0."""
        return self.max_abs / self.scale

    def add(self, left: Tensor, right: Tensor) -> None:
        """Count one more block of both in."""
        self.elements += left.numel()
        if left.dtype == right.dtype and torch.equal(left, right):  # never where there are NaN
            self.scale = max(self.scale, _largest_finite(left))
            return
        a, b = _doubles(left), _doubles(right)
        exact = left.dtype == right.dtype and not (left.is_floating_point() or left.is_complex())
        apart = (left != right).reshape(-1) if exact else (a != b) & ~(a.isnan() & b.isnan())
        self.differing += int(apart.sum())
        self.scale = max(self.scale, _largest_finite(a))
        self.max_abs = max(self.max_abs, _largest_finite((a - b)[a.isfinite() & b.isfinite()]))


def health(reader: Reader, name: str) -> TensorHealth:
    """Look at all numbers of one tensor, chunk by chunk as they are stored."""
    found = TensorHealth()
    for chunk in reader.tensors[name].chunks:
        for offsets, sizes in pieces(chunk.sizes, at=chunk.offsets):
            found.add(reader.read(name, offsets, sizes))
    return found


def difference(left: Reader, right: Reader, name: str, other: str | None = None) -> Difference:
    """Compare tensor `name` on the left with `other` (default: the same name) on the right; their shapes are equal."""
    found = Difference()
    for offsets, sizes in pieces(left.tensors[name].shape):
        found.add(left.read(name, offsets, sizes), right.read(other or name, offsets, sizes))
    return found


def _doubles(block: Tensor) -> Tensor:
    """In a row, as float64; of complex numbers both parts."""
    if block.is_complex():
        block = torch.view_as_real(block.to(torch.complex128))
    return block.reshape(-1).to(torch.float64)


def _largest_finite(values: Tensor) -> float:
    """Largest absolute value of those that are finite."""
    if values.numel() == 0:
        return 0.0
    comparable = not values.is_complex() and values.dtype.itemsize > 1  # torch compares no others
    low, high = (float(bound) for bound in (values if comparable else _doubles(values)).aminmax())
    if math.isfinite(low) and math.isfinite(high):
        return max(abs(low), abs(high))
    finite = _doubles(values)
    finite = finite[finite.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


@dataclass(frozen=True)
class RecutSource:
    """What a written tensor of this shape and dtype is made of: the tensor `name`, block by block; `read` reads a block
    ``(reader, name, offsets, sizes)`` of the written tensor, by default the same block of `name`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Reader, str, list[int], list[int]], Tensor] | None = None


@dataclass
class Recut:
    """A plan of so many `files` with the tensors of `wanted`, by the name to be written; after they are written the
    table of their tensors, and the sums of the runs of each file (see `phalanx.checkpoint.format.run_sums`)."""

    wanted: Mapping[str, RecutSource]
    files: int
    _dealt: list[list[tuple[str, list[int], list[int]]]] = field(init=False)
    _written: dict[str, list[Chunk]] = field(default_factory=dict)
    sums: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._dealt = [[] for _ in range(self.files)]
        loads = [(0, number) for number in range(self.files)]
        for name, source in self.wanted.items():
            itemsize = torch_dtype(source.dtype).itemsize
            for offsets, sizes in pieces(source.shape, max(1, CHUNK_BYTES // itemsize)):
                load, number = loads[0]
                self._dealt[number].append((name, offsets, sizes))
                heapq.heapreplace(loads, (load + itemsize * torch.Size(sizes).numel(), number))

    @property
    def data_bytes(self) -> int:
        """Of all elements together."""
        return sum(torch_dtype(s.dtype).itemsize * torch.Size(s.shape).numel() for s in self.wanted.values())

    def names(self) -> list[str]:
        """Of the files to write; those of ranks that would have nothing are left out, but the first is always there."""
        return [f"__{number}_0.distcp" for number, dealt in enumerate(self._dealt) if dealt or number == 0]

    def content(self, file: str, reader: Reader) -> Iterator[memoryview]:
        """The bytes of one of the files, archive by archive; when they are through, its chunks are in the table.

        Raises:
            DamagedCheckpointError: what is read is damaged.
        """
        at, sums = 0, RunSums()
        for name, offsets, sizes in self._dealt[int(file.removeprefix("__").partition("_")[0])]:
            source = self.wanted[name]
            read = source.read or Reader.read
            block = read(reader, source.name, offsets, sizes).to(torch_dtype(source.dtype)).contiguous()
            whole = block if block.untyped_storage().nbytes() == block.nbytes else block.clone()
            buffer = io.BytesIO()
            torch.save(whole, buffer)
            archive = buffer.getbuffer()
            chunk = Chunk(offsets=offsets, sizes=sizes, file=file, offset=at, length=len(archive))
            self._written.setdefault(name, []).append(chunk)
            at += len(archive)
            sums.cut()
            sums.update(archive)
            yield archive
        self.sums[file] = sums.finish()

    def tensors(self) -> dict[str, TensorEntry]:
        """The table of a manifest."""
        return {
            name: TensorEntry(dtype=source.dtype, shape=list(source.shape), chunks=self._written.get(name, []))
            for name, source in self.wanted.items()
        }


def same(entry: TensorEntry, name: str, dtype: str | None = None) -> RecutSource:
    """A tensor written as it is; with `dtype`, floating-point numbers rounded to that."""
    cast = dtype is not None and torch_dtype(entry.dtype).is_floating_point
    return RecutSource(name, tuple(entry.shape), dtype if cast and dtype is not None else entry.dtype)
