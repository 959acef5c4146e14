"""What part of a logical tensor a rank holds; all that optimizers and checkpoints know of layouts. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.core.layout import Axis


@dataclass(frozen=True)
class Shard:
    """A block ``[offsets, offsets + sizes)`` of a logical tensor of `shape`.

    Attributes:
        shape: of the whole tensor.
        offsets: first index of the block in every dimension.
        sizes: shape of the block; a rank may hold nothing (a size of 0).
        axes: along which ranks hold different blocks; a sum over the whole tensor is complete after adding over them.
            Along every other axis the block is the same.
        owner: whether this rank is the one, of those with the same block, that writes it to a checkpoint.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: tuple[Axis, ...] = ()
    owner: bool = True

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.offsets) == len(self.sizes):
            raise ValueError(f"shape {self.shape}, offsets {self.offsets}, sizes {self.sizes} differ in dimensions")
        for whole, start, size in zip(self.shape, self.offsets, self.sizes, strict=True):
            if start < 0 or size < 0 or start + size > whole:
                raise ValueError(f"block {self.offsets} + {self.sizes} is not inside {self.shape}")

    @staticmethod
    def whole(shape: tuple[int, ...], *, owner: bool = True) -> Shard:
        """All of a tensor."""
        return Shard(tuple(shape), (0,) * len(shape), tuple(shape), (), owner)

    @property
    def is_whole(self) -> bool:
        """Whether the block is the whole tensor."""
        return self.sizes == self.shape

    @property
    def numel(self) -> int:
        """Elements of the block."""
        return math.prod(self.sizes)

    def rows(self, start: int, count: int, axes: tuple[Axis, ...], *, owner: bool | None = None) -> Shard:
        """Rows ``[start, start + count)`` (dimension 0) of this block, spread over `axes` beside its own."""
        offsets = (self.offsets[0] + start, *self.offsets[1:])
        kept = self.owner if owner is None else owner
        return Shard(self.shape, offsets, (count, *self.sizes[1:]), (*self.axes, *axes), kept)
