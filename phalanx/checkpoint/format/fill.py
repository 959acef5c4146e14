"""Filling blocks of tensors from whatever chunks of a checkpoint overlap them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from phalanx.checkpoint.format.archive import read_box
from phalanx.checkpoint.format.blocks import Block
from phalanx.checkpoint.format.boxes import overlap
from phalanx.checkpoint.format.dcp import torch_dtype
from phalanx.checkpoint.format.files import Files, files_of
from phalanx.checkpoint.format.manifest import Chunk, TensorEntry


@dataclass(frozen=True)
class _Piece:
    """The part `out` of a target that a chunk fills, and where in the chunk that part begins."""

    chunk: Chunk
    dtype: torch.dtype
    start: list[int]
    out: Tensor


def fill(place: Path | Files, saved: Mapping[str, TensorEntry], targets: Mapping[str, Block]) -> None:
    """Fill the memory of `targets` with their blocks of the tensors of the same names in the checkpoint at `place`.

    Only chunks that overlap a target are opened, each once and file by file in the order of their bytes; of large ones
    only the rows needed are read. Beyond the targets it takes the memory of one slab (`archive.SLAB_BYTES`), or of one
    chunk where an earlier version stored it out of order.

    Raises:
        OSError, ValueError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile: the files are not what `saved`
            says.
    """
    files = files_of(place)
    pieces = [piece for name, block in targets.items() for piece in _pieces(saved[name], block)]
    pieces.sort(key=lambda piece: (piece.chunk.file, piece.chunk.offset))
    for name, group in groupby(pieces, key=lambda piece: piece.chunk.file):
        with files.open(name) as file:
            for piece in group:
                extent = (piece.chunk.offset, piece.chunk.length)
                read_box(file, extent, (piece.chunk.sizes, piece.dtype), piece.start, piece.out)


def _pieces(entry: TensorEntry, block: Block) -> Iterator[_Piece]:
    dtype = torch_dtype(entry.dtype)
    for chunk in entry.chunks:
        shared = overlap(chunk, block.shard)
        if shared is not None:
            offsets, sizes = shared
            start = [o - c for o, c in zip(offsets, chunk.offsets, strict=True)]
            yield _Piece(chunk, dtype, start, _part(block, offsets, sizes))


def _part(block: Block, offsets: list[int], sizes: list[int]) -> Tensor:
    part = block.tensor
    for dimension, (offset, first, size) in enumerate(zip(offsets, block.shard.offsets, sizes, strict=True)):
        part = part.narrow(dimension, offset - first, size)
    return part
