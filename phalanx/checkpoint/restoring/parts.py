"""What has to be read to fill the blocks of this rank: where saved blocks and blocks wanted meet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.checkpoint.format.blocks import Block
from phalanx.checkpoint.format.boxes import overlap
from phalanx.checkpoint.format.dcp import torch_dtype


@dataclass(frozen=True)
class SavedBlock:
    """A block of a saved tensor, and where its bytes are.

    Attributes:
        offsets, sizes: of the block.
        holder: number of what holds it: a shard in memory, or a file.
        start_bytes, length_bytes: where in that; elements in memory, an archive in a file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    holder: int
    start_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that was saved: dtype as in torch without the prefix, global shape, and the blocks that fill it."""

    dtype: str
    shape: tuple[int, ...]
    blocks: Sequence[SavedBlock]


@dataclass(frozen=True)
class Part:
    """The box of a saved block, of the shape of `out` and beginning at `start` in it, that goes to `out`."""

    name: str
    block: SavedBlock
    dtype: torch.dtype
    start: tuple[int, ...]
    out: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of what is wanted, as it was saved."""
        return self.out.numel() * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (along the first dimension) of the saved block."""
        return math.prod(self.block.sizes[1:]) * self.dtype.itemsize

    @property
    def run(self) -> tuple[int, int]:
        """First byte and end of the rows needed, in memory in which the block lies in order."""
        if not self.block.sizes:
            return self.block.start_bytes, self.block.start_bytes + self.dtype.itemsize
        first = self.block.start_bytes + self.start[0] * self.row_bytes
        return first, first + self.out.shape[0] * self.row_bytes

    def split(self, limit_bytes: int) -> Iterator[Part]:
        """In runs of rows that take at most `limit_bytes`, or one row."""
        if not self.start or self.nbytes <= limit_bytes:
            yield self
            return
        rows = max(1, limit_bytes // max(1, self.row_bytes))
        for first in range(0, self.out.shape[0], rows):
            start = (self.start[0] + first, *self.start[1:])
            yield Part(self.name, self.block, self.dtype, start, self.out[first : first + rows])


def parts(saved: Mapping[str, SavedTensor], wanted: Mapping[str, Block]) -> list[Part]:
    """All that fills the blocks in `wanted` of those in `saved`, in the order of the holders' bytes."""
    found = [part for name, block in wanted.items() if name in saved for part in _meetings(name, saved[name], block)]
    return sorted(found, key=lambda part: (part.block.holder, part.block.start_bytes, part.start))


def _meetings(name: str, saved: SavedTensor, wanted: Block) -> Iterator[Part]:
    dtype = torch_dtype(saved.dtype)
    for block in saved.blocks:
        shared = overlap(block, wanted.shard)
        if shared is not None:
            offsets, sizes = shared
            start = tuple(o - b for o, b in zip(offsets, block.offsets, strict=True))
            out = wanted.tensor
            for dimension, (offset, first, size) in enumerate(zip(offsets, wanted.shard.offsets, sizes, strict=True)):
                out = out.narrow(dimension, offset - first, size)
            yield Part(name, block, dtype, start, out)
