"""Boxes of a logical tensor: where two meet, and whether some of them cover it exactly once. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Box(Protocol):
    """A block ``[offsets, offsets + sizes)``, such as a `phalanx.core.layout.Shard` or a chunk of a file."""

    @property
    def offsets(self) -> Sequence[int]:
        """First index in every dimension."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Number of indices in every dimension."""
        ...


B = TypeVar("B", bound=Box)


def overlap(left: Box, right: Box) -> tuple[list[int], list[int]] | None:
    """Offsets and sizes of what two boxes of one tensor share; None if that is nothing."""
    offsets, sizes = [], []
    for a, a_size, b, b_size in zip(left.offsets, left.sizes, right.offsets, right.sizes, strict=True):
        start = a if a > b else b
        size = min(a + a_size, b + b_size) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return offsets, sizes


def cover_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of `shape` exactly once, in a few words; None if they do."""
    pair = clash(boxes)
    if pair is not None:
        return f"{written(pair[0])} and {written(pair[1])} overlap"
    elements, covered = math.prod(shape), sum(math.prod(box.sizes) for box in boxes)
    if covered != elements:
        return f"its chunks do not fill it: {covered} of {elements} elements"
    return None


def clash(boxes: Sequence[B]) -> tuple[B, B] | None:
    """Two of `boxes` that share an element, if there are such.

    A sweep along the dimension with the most borders, in which only boxes that reach the present place are compared:
    n log n for a tensor cut along one dimension into n parts.
    """
    if len(boxes) < 2:
        return None
    dimensions = range(len(boxes[0].offsets))
    axis = max(dimensions, key=lambda d: len({box.offsets[d] for box in boxes}), default=None)
    if axis is None:
        return boxes[0], boxes[1]  # two writers of one number
    reaching: list[B] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        reaching = [other for other in reaching if other.offsets[axis] + other.sizes[axis] > box.offsets[axis]]
        for other in reaching:
            if overlap(other, box) is not None:
                return other, box
        reaching.append(box)
    return None


def written(box: Box) -> str:
    """``[0:4, 2:6]``."""
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True)) + "]"
