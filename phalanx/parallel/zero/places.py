"""Where stored parameters lie on flat buckets, and which rows of the logical ones a rank's part of a bucket holds.

A bucket is a table of rows of the hidden width. Every stored parameter begins at a row of its own: matrices are as wide
as the table, vectors fill a row and more and leave the rest of their last row empty. The table is padded to a multiple
of the number of ranks that share it, so its equal parts are runs of rows of matrices and of elements of vectors, and
gathering and scattering move no data within a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from phalanx.model.layers import Part, Stored
from phalanx.model.part import DecoderPart

# How much smaller than the others the first bucket of a kind is.
_FIRST = 8


@dataclass
class StoredParameter:
    """One stored parameter of a model part, still without memory.

    Attributes:
        meta: the parameter as the part was built with it.
        parts: the logical parameters in it, by rows (elements of vectors).
        holders: module and attribute, wherever it is registered (a tied weight in two modules).
    """

    meta: nn.Parameter
    parts: tuple[Part, ...]
    holders: list[tuple[nn.Module, str]]


@dataclass(frozen=True)
class Kind:
    """What parameters of one bucket have in common.

    Attributes:
        dtype: of the gathered weights.
        vectors: whether they are vectors, which stay gathered also where parameters are split (ZeRO-3).
        shared: the same on all tensor-parallel ranks, whose gradients are then parts of a sum.
        tied: held by the first and the last stage.
        unit: the part of the model that is gathered at once (ZeRO-3); -1 where all of it is.
    """

    dtype: torch.dtype
    vectors: bool
    shared: bool
    tied: bool
    unit: int


@dataclass(frozen=True)
class Slot:
    """A stored parameter in a bucket: its rows ``[row, row + rows)``, `numel` elements from the first on."""

    stored: StoredParameter
    order: int
    row: int
    rows: int

    @property
    def numel(self) -> int:
        """Elements of the parameter, without padding."""
        return self.stored.meta.numel()


@dataclass
class Place:
    """A bucket as planned: its kind, and its slots from the first row on."""

    kind: Kind
    width: int
    slots: list[Slot] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows that are in use."""
        return self.slots[-1].row + self.slots[-1].rows if self.slots else 0

    @property
    def first_use(self) -> int:
        """Place of its first parameter in the order of use."""
        return min(slot.order for slot in self.slots)

    def padded_rows(self, ranks: int) -> int:
        """Rows of the whole table, for equal parts."""
        return -(-self.rows // ranks) * ranks

    def add(self, stored: StoredParameter, order: int) -> None:
        """Put a parameter behind the others."""
        self.slots.append(Slot(stored, order, self.rows, rows_of(stored.meta, self.width)))


@dataclass(frozen=True)
class Run:
    """What a rank's part of a bucket holds of one logical parameter; it may be nothing.

    Attributes:
        name: of the logical parameter.
        start, count: rows (elements of vectors) of it, as this tensor-parallel rank numbers them.
        offset: first element, from the beginning of the rank's part of the bucket.
        shape: of the run.
    """

    name: str
    start: int
    count: int
    offset: int
    shape: tuple[int, ...]


def stored_parameters(part: DecoderPart) -> list[StoredParameter]:
    """All stored parameters in order of use; those that are no longer on the meta device belong to somebody else."""
    found: dict[int, StoredParameter] = {}
    for module in part.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            own = tuple(p for p in module.parts if p.attribute == attribute) if isinstance(module, Stored) else ()
            entry = found.setdefault(id(parameter), StoredParameter(parameter, (), []))
            entry.parts += own
            entry.holders.append((module, attribute))
    mine = [stored for stored in found.values() if stored.meta.is_meta]
    for stored in mine:
        assert stored.parts, f"a parameter of {type(stored.holders[0][0]).__name__} has no logical name"
    return mine


def plan_places(
    stored: Iterable[StoredParameter], kind_of: Callable[[StoredParameter], Kind], width: int, bucket_bytes: int
) -> list[Place]:
    """Buckets in order of use; one is closed when the next parameter of its kind would make it too large.

    The first bucket of a kind is smaller: nothing is computed yet that could hide its gather, and nothing any more that
    could hide its reduction.

    Args:
        width: elements of a row.
        bucket_bytes: the size, in fp32, that only a bucket of a single parameter exceeds.
    """
    places: list[Place] = []
    limits: dict[Kind, int] = {}
    open_places: dict[Kind, Place] = {}
    for order, one in enumerate(stored):
        kind = kind_of(one)
        place = open_places.get(kind)
        size = 0 if place is None else (place.rows + rows_of(one.meta, width)) * width * 4
        if place is None or size > limits[kind]:
            limits[kind] = bucket_bytes // _FIRST if place is None else bucket_bytes
            place = open_places[kind] = Place(kind, width)
            places.append(place)
        place.add(one, order)
    return places


def rows_of(parameter: torch.Tensor, width: int) -> int:
    """Rows of a bucket that a stored parameter takes."""
    assert parameter.dim() == 1 or parameter.shape[1:] == (width,), f"{tuple(parameter.shape)} has no rows of {width}"
    return -(-parameter.numel() // width)


def runs(place: Place, first_row: int, rows: int) -> Iterator[Run]:
    """What the rows ``[first_row, first_row + rows)`` of a bucket hold of each of its logical parameters, in order."""
    begin, end = first_row * place.width, (first_row + rows) * place.width
    for slot in place.slots:
        step = 1 if slot.stored.meta.dim() == 1 else place.width
        for part in slot.stored.parts:
            first = slot.row * place.width + part.start * step
            start, stop = (min(max(edge, first), first + part.rows * step) for edge in (begin, end))
            shape = ((stop - start) // step, *slot.stored.meta.shape[1:])
            offset = min(max(first, begin), end) - begin
            yield Run(part.name, (start - first) // step, shape[0], offset, shape)
