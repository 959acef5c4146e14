"""Writing the tensors of one checkpoint anew: into other files, in another dtype, under other names, a piece at a time.

A tensor is cut along its rows into chunks of at most `CHUNK_BYTES`, which are dealt out to the files so that these are
about equally long. At most one chunk is in memory, twice.
"""

from __future__ import annotations

import heapq
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.checkpoint.format.dcp import torch_dtype
from phalanx.checkpoint.format.inspecting import Reader, pieces
from phalanx.checkpoint.format.manifest import Chunk, TensorEntry
from phalanx.checkpoint.format.runs import RunSums

CHUNK_BYTES = 1 << 25
"""The largest chunk that is written, and so what a conversion takes of memory, about twice over."""


@dataclass(frozen=True)
class Source:
    """What a written tensor is made of.

    Attributes:
        name: the tensor that is read.
        shape: of the written tensor.
        dtype: of the written tensor, as in torch without the prefix.
        read: reads a block ``(reader, name, offsets, sizes)`` of the written tensor; default: the same block of `name`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[Reader, str, list[int], list[int]], Tensor] | None = None


@dataclass
class Recut:
    """A plan of files, and after they are written the table of their tensors.

    Args:
        wanted: by the name to be written.
        files: how many.

    Attributes:
        sums: of the runs of each file that was written, see `phalanx.checkpoint.format.runs`.
    """

    wanted: Mapping[str, Source]
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
            archive = _archive(self._block(reader, name, offsets, sizes))
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

    def _block(self, reader: Reader, name: str, offsets: list[int], sizes: list[int]) -> Tensor:
        source = self.wanted[name]
        read = source.read or Reader.read
        block = read(reader, source.name, offsets, sizes)
        return block.to(torch_dtype(source.dtype)).contiguous()


def same(entry: TensorEntry, name: str, dtype: str | None = None) -> Source:
    """A tensor written as it is; with `dtype`, floating-point numbers rounded to that."""
    cast = dtype is not None and torch_dtype(entry.dtype).is_floating_point
    return Source(name, tuple(entry.shape), dtype if cast and dtype is not None else entry.dtype)


def _archive(block: Tensor) -> memoryview:
    whole = block if block.untyped_storage().nbytes() == block.nbytes else block.clone()
    buffer = io.BytesIO()
    torch.save(whole, buffer)
    return buffer.getbuffer()
