"""One bucket: where stored parameters lie in its flat memory, and the collectives over it.

A bucket is a table of rows of the hidden width. Every stored parameter begins at a row of its own: matrices are as wide
as the table, vectors fill a row and more and leave the rest of their last row empty. The table is padded to a multiple
of the number of ranks that share it, so its equal parts are runs of rows of matrices and of elements of vectors, and
gathering and scattering move no data within a rank.

Three flat buffers: *weights*, what the model computes with; *master*, this rank's part in fp32, which the optimizer
updates; *gradients* in fp32. What is whole and what a part depends on the ZeRO stage (arXiv 1910.02054):

    ZeRO-1   weights whole, gradients whole; their own part becomes the sum over ranks
    ZeRO-2   weights whole, gradients whole until they are reduced, then a part
    ZeRO-3   weights whole while they are needed; gradients as in ZeRO-2, reduced after every backward pass

The master is a part of the weights where these are fp32 and stay; memory of its own otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from phalanx.model.layers import Part, Stored
from phalanx.parallel.group import Group, Work

# How much smaller than the others the first bucket of a kind is.
_FIRST = 8


@dataclass
class StoredParameter:
    """One stored parameter of a model part, still without memory."""

    meta: nn.Parameter  # the parameter as the part was built with it
    parts: tuple[Part, ...]  # the logical parameters in it, by rows (elements of vectors)
    # module and attribute, wherever it is registered (a tied weight in two modules)
    holders: list[tuple[nn.Module, str]]


@dataclass(frozen=True)
class BucketKind:
    """What parameters of one bucket have in common."""

    dtype: torch.dtype  # of the gathered weights
    vectors: bool  # whether they are vectors, which stay gathered also where parameters are split (ZeRO-3)
    shared: bool  # the same on all tensor-parallel ranks, whose gradients are then parts of a sum
    tied: bool  # held by the first and the last stage
    unit: int  # the part of the model that is gathered at once (ZeRO-3); -1 where all of it is


@dataclass(frozen=True)
class _Slot:
    """A stored parameter in a bucket: its rows ``[row, row + rows)``, all elements from the first on."""

    stored: StoredParameter
    order: int
    row: int
    rows: int


@dataclass
class BucketLayout:
    """A bucket as planned: its kind, and its slots from the first row on."""

    kind: BucketKind
    width: int
    slots: list[_Slot] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows that are in use."""
        return self.slots[-1].row + self.slots[-1].rows if self.slots else 0

    def add(self, stored: StoredParameter, order: int) -> None:
        """Put a parameter behind the others."""
        self.slots.append(_Slot(stored, order, self.rows, rows_of(stored.meta, self.width)))

    @property
    def first_use(self) -> int:
        """Place of its first parameter in the order of use."""
        return min(slot.order for slot in self.slots)

    def padded_rows(self, ranks: int) -> int:
        """Rows of the whole table, for equal parts."""
        return -(-self.rows // ranks) * ranks


@dataclass(frozen=True)
class HeldRows:
    """What a rank's part of a bucket holds of one logical parameter; it may be nothing."""

    name: str  # of the logical parameter
    # start, count: rows (elements of vectors) of it, as this tensor-parallel rank numbers them
    start: int
    count: int
    offset: int  # first element, from the beginning of the rank's part of the bucket
    shape: tuple[int, ...]  # of the run


def stored_parameters(part: nn.Module) -> list[StoredParameter]:
    """All stored parameters in order of use; those that are not on the meta device belong to another chunk."""
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
    stored: Iterable[StoredParameter], kind_of: Callable[[StoredParameter], BucketKind], width: int, bucket_bytes: int
) -> list[BucketLayout]:
    """Buckets in order of use; one is closed when the next parameter would make it larger than `bucket_bytes`.

    The first bucket of a kind is smaller: nothing is computed yet that could hide its gather, and nothing any more that
    could hide its reduction.
    """
    places: list[BucketLayout] = []
    limits: dict[BucketKind, int] = {}
    open_places: dict[BucketKind, BucketLayout] = {}
    for order, one in enumerate(stored):
        kind = kind_of(one)
        place = open_places.get(kind)
        size = 0 if place is None else (place.rows + rows_of(one.meta, width)) * width * 4
        if place is None or size > limits[kind]:
            limits[kind] = bucket_bytes // _FIRST if place is None else bucket_bytes
            place = open_places[kind] = BucketLayout(kind, width)
            places.append(place)
        place.add(one, order)
    return places


def rows_of(parameter: torch.Tensor, width: int) -> int:
    """Rows of a bucket that a stored parameter takes."""
    assert parameter.dim() == 1 or parameter.shape[1:] == (width,), f"{tuple(parameter.shape)} has no rows of {width}"
    return -(-parameter.numel() // width)


def runs(place: BucketLayout, first_row: int, rows: int) -> Iterator[HeldRows]:
    """What the rows ``[first_row, first_row + rows)`` of a bucket hold of each of its logical parameters, in order."""
    begin, end = first_row * place.width, (first_row + rows) * place.width
    for slot in place.slots:
        step = 1 if slot.stored.meta.dim() == 1 else place.width
        for part in slot.stored.parts:
            first = slot.row * place.width + part.start * step
            start, stop = (min(max(edge, first), first + part.rows * step) for edge in (begin, end))
            shape = ((stop - start) // step, *slot.stored.meta.shape[1:])
            offset = min(max(first, begin), end) - begin
            yield HeldRows(part.name, (start - first) // step, shape[0], offset, shape)


@dataclass(frozen=True)
class BucketGroups:
    """Who works on a bucket."""

    split: Group  # the ranks that hold a part each
    # groups over which parts of gradients are added besides: replicas, tensor ranks that share the parameters
    add: tuple[Group, ...]
    tied: Group | None = None  # the other stage that holds the same embedding, if there is one


class Bucket:
    """Stored parameters on flat memory, and this rank's part of them; gradients travel in `wire_dtype`."""

    def __init__(
        self, place: BucketLayout, groups: BucketGroups, zero: int, wire_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.place, self.groups, self.device, self.wire_dtype = place, groups, device, wire_dtype
        # The members meet now: later, one could wait for another that waits for it in another group.
        for group in (groups.split, *groups.add, groups.tied):
            if group is not None and group.size > 1:
                _ = group.backend
        self.zero = zero if groups.split.size > 1 else 1
        self.keeps_weights = self.zero < 3 or place.kind.vectors  # whether the weights stay whole
        rows = place.padded_rows(groups.split.size)
        part_rows = rows // groups.split.size
        first_row = groups.split.index * part_rows
        self._size = rows * place.width
        self._own = slice(first_row * place.width, (first_row + part_rows) * place.width)
        self._weights = torch.zeros(self._size, dtype=place.kind.dtype, device=device)
        self._in_place = self.keeps_weights and place.kind.dtype == torch.float32
        own = self._weights[self._own]
        self._master = own if self._in_place else torch.zeros_like(own, dtype=torch.float32)
        # What the model computes with, one for each slot, installed in its modules.
        self.parameters = [self._install(slot) for slot in place.slots]
        # This rank's rows of the logical parameters, fp32; gradients arrive on them.
        self.masters = [(run, nn.Parameter(_cut(self._master, run))) for run in runs(place, first_row, part_rows)]
        self._gathering: Work | None = None
        self._whole = True
        self._gradients: Tensor | None = None
        self._views: list[Tensor] = []
        self._sum: Tensor | None = None
        self._has_sum = False
        self._sending: list[Tensor] = []
        self._on_wire: Tensor | None = None
        self._bound: Tensor | None = None
        if not self.keeps_weights:
            self.release()

    def _install(self, slot: _Slot) -> nn.Parameter:
        # `.data` has a version counter of its own: filling the flat memory anew is not a change of what autograd saved.
        flat = self._weights.data[slot.row * self.place.width :]
        parameter = nn.Parameter(flat[: slot.stored.meta.numel()].view(slot.stored.meta.shape))
        parameter.grad_dtype = torch.float32
        for module, attribute in slot.stored.holders:
            module.register_parameter(attribute, parameter)
        return parameter

    # Weights

    def gather(self) -> None:
        """Start to make the weights whole from the masters of all ranks."""
        self.wait()
        if not self.keeps_weights:
            self._weights.untyped_storage().resize_(self._size * self._weights.element_size())
        own = self._weights[self._own]
        if not self._in_place:
            own.copy_(self._master)
        self._gathering = self.groups.split.all_gather(self._weights, own)
        self._whole = True

    def need(self) -> None:
        """Start to make the weights whole unless they are, or are becoming so."""
        if not self._whole:
            self.gather()

    def wait(self) -> None:
        """Wait for the weights that are on their way."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """Free the whole weights (ZeRO-3); the parameters stay, without memory."""
        self.wait()
        self._weights.untyped_storage().resize_(0)
        self._whole = False

    # Gradients

    def collect(self, index: int) -> None:
        """Take the gradient of the parameter of slot `index` into flat memory, where it stays."""
        parameter = self.parameters[index]
        if self._gradients is None:
            flat = torch.empty(self._size, device=self.device)
            starts = [slot.row * self.place.width for slot in self.place.slots]
            ends = [start + slot.stored.meta.numel() for start, slot in zip(starts, self.place.slots, strict=True)]
            # Only the padding is filled: what gradients take is written by the first of them.
            for end, next_start in zip(ends, [*starts[1:], self._size], strict=True):
                flat[end:next_start].zero_()
            self._gradients = flat
            # `.data` makes tensors that anybody may add to, whether or not autograd is on then and was on here.
            self._views = [
                flat[start:end].view(own.shape).data
                for start, end, own in zip(starts, ends, self.parameters, strict=True)
            ]
        view = self._views[index]
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view

    def reduce(self, last: bool) -> Iterator[Work]:
        """Sum this rank's part of the gradients over ranks.

        Takes the gradients now, for they are where this is called. What is returned yields every collective as it is
        started, and is to be resumed when that is done; after the first, `sent`. With `last` nothing will be added any
        more: sum over replicas too.
        """
        # Without a gradient since the last reduction of the step (ZeRO-3), only its sum is added over replicas.
        has_gradients = self._gradients is not None or any(p.grad is not None for p in self.parameters)
        whole = None if self._has_sum and not has_gradients else self._take_gradients()
        if self.groups.split.size > 1 and whole is not None:
            self._sending.append(whole)
        return self._reduce(whole, last)

    def sent(self) -> None:
        """Let go of the oldest whole gradient that has been reduced."""
        if self._sending:
            del self._sending[0]

    def add_tied(self) -> Iterator[Work]:
        """Add what the other stage with the same weights has; not before both have made all their gradients."""
        if self.groups.tied is not None:
            yield from self._add(self.groups.tied)

    def bind(self) -> None:
        """Give the sums to the masters as their gradients."""
        assert self._sum is not None, "gradients have not been reduced"
        late = any(parameter.grad is not None for parameter in self.parameters)
        assert not late, "a gradient was made after its bucket had been reduced"
        if self._bound is not self._sum:
            self._bound = self._sum
            for run, master in self.masters:
                master.grad = _cut(self._sum, run)
        self._has_sum = False

    def drop_gradients(self) -> None:
        """Forget all gradients: of the parameters, of the masters, and sums that were begun."""
        for parameter in self.parameters:
            parameter.grad = None
        for _, master in self.masters:
            master.grad = None
        self._bound, self._has_sum = None, False
        if self.zero > 1:
            self._gradients, self._views = None, []

    def _take_gradients(self) -> Tensor:
        """The flat gradients, complete; the parameters, and with ZeRO-2 the bucket, let go of them."""
        for index, parameter in enumerate(self.parameters):
            self.collect(index)
            if parameter.grad is None:
                self._views[index].zero_()
            parameter.grad = None
        flat = self._gradients
        assert flat is not None
        if self.zero > 1:
            self._gradients, self._views = None, []
        return flat

    def _reduce(self, whole: Tensor | None, last: bool) -> Iterator[Work]:
        if whole is not None:
            yield from self._scatter(whole)
            del whole
        for group in self.groups.add if last else ():
            yield from self._add(group)

    def _scatter(self, whole: Tensor) -> Iterator[Work]:
        if self.zero == 1 and self._sum is None:
            self._sum = whole[self._own]
        elif self._sum is None:
            self._sum = torch.empty_like(self._master)
        # A second reduction of a step (ZeRO-3, after each backward pass) is added to the sum of those before.
        target = torch.empty_like(self._sum) if self._has_sum else self._sum
        self._has_sum = True
        if self.groups.split.size > 1:
            self._on_wire = whole.to(self.wire_dtype)
            del whole
            yield self.groups.split.reduce_scatter(target, self._on_wire)
            self._on_wire = None
        if target is not self._sum:
            self._sum.add_(target)

    def _add(self, group: Group) -> Iterator[Work]:
        assert self._sum is not None
        sent = self._sum.to(self.wire_dtype)
        yield group.all_reduce(sent)
        if sent is not self._sum:
            self._sum.copy_(sent)


def _cut(flat: Tensor, run: HeldRows) -> Tensor:
    count = run.count if len(run.shape) == 1 else run.count * run.shape[1]
    return flat[run.offset : run.offset + count].view(run.shape)
