"""The named axes of a layout, which rank sits where, and what part of a logical tensor a rank holds.

A rank is the mixed-radix number of its coordinates, pipeline the slowest digit and tensor the fastest:

    rank = (((pipeline * R + replicate) * S + shard) * C + context) * T + tensor

So a tensor-parallel group is a run of neighbours, which share a host; context and data-parallel groups come next, so
that their traffic stays under the nearest switches; pipeline stages, which say least to each other, are farthest apart
(MegaScale, "Setting": data-parallel groups are placed before pipeline groups).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, get_args

Axis = Literal["pipeline", "replicate", "shard", "context", "tensor"]

AXES: tuple[Axis, ...] = get_args(Axis)
"""All axes, slowest first."""

_SHORT = {"pipeline": "pp", "replicate": "dp", "shard": "fs", "context": "cp", "tensor": "tp"}


class Coordinates(NamedTuple):
    """Where a rank sits: its index along every axis."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """How many ranks each axis has; 1 where it is not used."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis, size in asdict(self).items():
            if size < 1:
                raise ValueError(f"{axis} = {size}: an axis has at least one rank")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks along every axis, in the order of `AXES`."""
        return (self.pipeline, self.replicate, self.shard, self.context, self.tensor)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(self.sizes)

    def size(self, *axes: Axis) -> int:
        """Ranks in a group that spans `axes`."""
        return math.prod(getattr(self, axis) for axis in axes)

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` sits; a `ValueError` where there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank = {rank}: this layout has ranks 0 to {self.world_size - 1}")
        digits = []
        for size in reversed(self.sizes):
            rank, digit = divmod(rank, size)
            digits.append(digit)
        return Coordinates(*reversed(digits))

    def rank(self, coordinates: Coordinates) -> int:
        """The rank that sits at `coordinates`."""
        rank = 0
        for size, digit in zip(self.sizes, coordinates, strict=True):
            rank = rank * size + digit
        return rank

    def index(self, rank: int, axes: Iterable[Axis]) -> int:
        """The place of `rank` within its group over `axes`."""
        return self.members(rank, axes).index(rank)

    def members(self, rank: int, axes: Iterable[Axis]) -> tuple[int, ...]:
        """The ranks of the group of `rank` over `axes`: those that differ from it along no other axis, in order."""
        spanned, here = set(axes), self.coordinates(rank)
        ranges = [
            range(size) if axis in spanned else (digit,)
            for axis, size, digit in zip(AXES, self.sizes, here, strict=True)
        ]
        return tuple(self.rank(Coordinates(*digits)) for digits in itertools.product(*ranges))

    def groups(self, axes: Iterable[Axis]) -> list[tuple[int, ...]]:
        """All groups over `axes`, ordered by their first rank; every rank is in exactly one."""
        spanned = set(axes)
        ranges = [(0,) if axis in spanned else range(size) for axis, size in zip(AXES, self.sizes, strict=True)]
        return [self.members(self.rank(Coordinates(*digits)), spanned) for digits in itertools.product(*ranges)]

    def __str__(self) -> str:
        """Such as ``pp2·dp2·tp2``; ``1`` for a single process."""
        used = [f"{_SHORT[axis]}{size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return "·".join(used) or "1"


def divisors(number: int) -> list[int]:
    """The divisors of `number`, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


@dataclass(frozen=True)
class Shard:
    """A block ``[offsets, offsets + sizes)`` of a logical tensor of `shape`; a rank may hold nothing (a size of 0)."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    # along which ranks hold different blocks; a sum over the whole tensor is complete after adding over them. Along
    # every other axis the block is the same
    axes: tuple[Axis, ...] = ()
    owner: bool = True  # whether this rank is the one, of those with the same block, that writes it to a checkpoint

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
