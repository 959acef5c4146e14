"""Updates of many parameters in one launch: the Triton twins of `phalanx.optim.adamw` and `phalanx.optim.lamb`.

A launch finds parameters, gradients and states by a table of addresses, and each of its programs its tile of a
parameter by another. All of them are read once (LAMB reads all but the gradient twice: the length of an update
is known only when all of it has been seen) and nothing is copied. Arithmetic is fp32; numbers of the step come from the
device, and a skipped step writes nothing.

A tile is `ROWS` blocks of `WIDTH` elements, each within one row, so that a block of 8-bit states has one scale.

This module needs Triton to be imported. Under ``TRITON_INTERPRET=1`` its kernels run on a CPU, which is how they are
tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.optim import quantise
from phalanx.optim.groups import BLOCK

_ROWS = 8
_WIDTH = BLOCK
_WARPS = 8


@triton.jit
def _address(table, parameter, which: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Of a parameter (0), its gradient (1), its moments (2, 3) or their scales (4, 5)."""
    pointer = tl.load(table + parameter * 6 + which).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _tile(shapes, tiles, numbers, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """The parameter, the offsets of the tile's elements and which of them there are, its blocks alike, and columns.

    There are none on a skipped step.
    """
    tile = tl.program_id(0).to(tl.int64)
    parameter = tl.load(tiles + 2 * tile)
    rows, columns = tl.load(shapes + 2 * parameter), tl.load(shapes + 2 * parameter + 1)
    rows = tl.where(tl.load(numbers + 8) > 0, rows, 0)
    if ALIGNED:
        columns = tl.multiple_of(columns, 16)
    per_row = (columns + WIDTH - 1) // WIDTH
    blocks = tl.load(tiles + 2 * tile + 1) + tl.arange(0, ROWS)
    row, start = blocks // per_row, (blocks % per_row) * WIDTH
    column = start[:, None] + tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (column < columns)
    return parameter, row[:, None] * columns + column, inside, blocks, row < rows, column


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _rounded(x, bits):
    word = x.to(tl.uint32, bitcast=True)
    finite = (word & 0x7F800000) != 0x7F800000
    word = tl.where(finite, word + (bits & 0xFFFF), word) & 0xFFFF0000
    return word.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _code(unit, borders, SIGNED: tl.constexpr):
    """The codes of values of at most 1: computed, then set right by the borders beside them, being at most one off."""
    size = tl.abs(unit)
    scale, count = tl.full(size.shape, 1e6, tl.float32), tl.full(size.shape, 1, tl.int32)
    scale, count = tl.where(size >= 1e-6, 1e5, scale), tl.where(size >= 1e-6, 2, count)
    scale, count = tl.where(size >= 1e-5, 1e4, scale), tl.where(size >= 1e-5, 4, count)
    scale, count = tl.where(size >= 1e-4, 1e3, scale), tl.where(size >= 1e-4, 8, count)
    scale, count = tl.where(size >= 1e-3, 1e2, scale), tl.where(size >= 1e-3, 16, count)
    scale, count = tl.where(size >= 1e-2, 1e1, scale), tl.where(size >= 1e-2, 32, count)
    scale, count = tl.where(size >= 1e-1, 1.0, scale), tl.where(size >= 1e-1, 64, count)
    if not SIGNED:
        count = count * 2
    place = ((size * scale - 0.1) * (1.0 / 0.9) * count).to(tl.int32)
    place = tl.minimum(tl.maximum(place, 0), count - 1)
    code = count - 1 + place
    if SIGNED:
        code = 127 + tl.where(unit < 0, -(count + place), count + place)
    higher = unit > tl.load(borders + tl.minimum(code, 254))
    lower = unit <= tl.load(borders + tl.maximum(code - 1, 0))
    return code + tl.where(higher & (code < 255), 1, 0) - tl.where(lower & (code > 0), 1, 0)


@triton.jit
def _load_moment(
    table, parameter, which: tl.constexpr, offsets, inside, blocks, there, book,
    BITS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    if BITS == 8:
        codes = tl.load(_address(table, parameter, which, tl.uint8, ALIGNED) + offsets, mask=inside, other=0)
        scales = tl.load(_address(table, parameter, which + 2, tl.float32, False) + blocks, mask=there, other=0.0)
        return tl.load(book + codes.to(tl.int32)) * scales[:, None]
    if BITS == 16:
        found = tl.load(_address(table, parameter, which, tl.bfloat16, ALIGNED) + offsets, mask=inside, other=0.0)
        return found.to(tl.float32)
    return tl.load(_address(table, parameter, which, tl.float32, ALIGNED) + offsets, mask=inside, other=0.0)


@triton.jit
def _store_moment(
    table, parameter, which: tl.constexpr, x, offsets, inside, blocks, there, borders, bits,
    BITS: tl.constexpr, ALIGNED: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    if BITS == 8:
        x = tl.where(inside, x, 0.0)
        scales = tl.max(tl.abs(x), axis=1)
        unit = tl.div_rn(x, tl.broadcast_to(tl.where(scales > 0, scales, 1.0)[:, None], x.shape))
        codes = _code(unit, borders, SIGNED)
        if not SIGNED:
            codes = tl.where(x > 0, tl.maximum(codes, 1), codes)
        tl.store(_address(table, parameter, which, tl.uint8, ALIGNED) + offsets, codes.to(tl.uint8), mask=inside)
        tl.store(_address(table, parameter, which + 2, tl.float32, False) + blocks, scales, mask=there)
    elif BITS == 16:
        tl.store(_address(table, parameter, which, tl.bfloat16, ALIGNED) + offsets, _rounded(x, bits), mask=inside)
    else:
        tl.store(_address(table, parameter, which, tl.float32, ALIGNED) + offsets, x, mask=inside)


@triton.jit
def _adamw(
    table, shapes, tiles, numbers, seed, books, borders,
    BITS: tl.constexpr, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    parameter, offsets, inside, blocks, there, column = _tile(shapes, tiles, numbers, ROWS, WIDTH, ALIGNED)
    shrink, size = tl.load(numbers), tl.load(numbers + 1)
    root, eps = tl.load(numbers + 2), tl.load(numbers + 3)
    to_m, keep_v, to_v = tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6)
    weights = _address(table, parameter, 0, tl.float32, ALIGNED) + offsets
    p = tl.load(weights, mask=inside, other=0.0)
    raw = tl.load(_address(table, parameter, 1, GRADIENT, ALIGNED) + offsets, mask=inside, other=0.0).to(tl.float32)
    m = _load_moment(table, parameter, 2, offsets, inside, blocks, there, books, BITS, ALIGNED)
    v = _load_moment(table, parameter, 3, offsets, inside, blocks, there, books + 256, BITS, ALIGNED)
    g = raw * tl.load(numbers + 7)
    m = m + to_m * (g - m)
    v = v * keep_v + g * g * to_v
    tl.store(weights, p * shrink - size * m / (tl.sqrt(v) * root + eps), mask=inside)
    bits = tl.full(p.shape, 0, tl.uint32)
    if BITS == 16:
        bits = _mix((column + tl.load(seed)).to(tl.uint32))
        bits = _mix((p.to(tl.uint32, bitcast=True) & 0xFFFF0000) ^ bits)
    _store_moment(table, parameter, 2, m, offsets, inside, blocks, there, borders, bits, BITS, ALIGNED, True)
    _store_moment(
        table, parameter, 3, v, offsets, inside, blocks, there, borders + 256, bits >> 16, BITS, ALIGNED, False
    )


@triton.jit
def _lamb_update(p, m, v, numbers):
    return m / (tl.sqrt(v) * tl.load(numbers + 1) + tl.load(numbers + 2)) + p * tl.load(numbers + 6)


@triton.jit
def _lamb_moments(
    table, shapes, tiles, numbers, sums,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    parameter, offsets, inside, _, _, _ = _tile(shapes, tiles, numbers, ROWS, WIDTH, ALIGNED)
    p = tl.load(_address(table, parameter, 0, tl.float32, ALIGNED) + offsets, mask=inside, other=0.0)
    g = tl.load(_address(table, parameter, 1, GRADIENT, ALIGNED) + offsets, mask=inside, other=0.0).to(tl.float32)
    first = _address(table, parameter, 2, tl.float32, ALIGNED) + offsets
    second = _address(table, parameter, 3, tl.float32, ALIGNED) + offsets
    m, v = tl.load(first, mask=inside, other=0.0), tl.load(second, mask=inside, other=0.0)
    g = g * tl.load(numbers + 7)
    m = m + tl.load(numbers + 3) * (g - m)
    v = v * tl.load(numbers + 4) + g * g * tl.load(numbers + 5)
    u = tl.where(inside, _lamb_update(p, m, v, numbers), 0.0)
    tl.store(first, m, mask=inside)
    tl.store(second, v, mask=inside)
    own = sums + 2 * tl.program_id(0).to(tl.int64)
    tl.store(own, tl.sum(tl.sum(p * p, axis=1), axis=0))
    tl.store(own + 1, tl.sum(tl.sum(u * u, axis=1), axis=0))


@triton.jit
def _lamb_squares(sums, ranges, squares, COUNT: tl.constexpr):
    """Add up the tiles of each parameter, in the same order at every run."""
    parameter = tl.program_id(0)
    start, stop = tl.load(ranges + parameter), tl.load(ranges + parameter + 1)
    weights, updates = tl.zeros((COUNT,), tl.float32), tl.zeros((COUNT,), tl.float32)
    for at in range(start, stop, COUNT):
        tile = at + tl.arange(0, COUNT)
        weights += tl.load(sums + 2 * tile, mask=tile < stop, other=0.0)
        updates += tl.load(sums + 2 * tile + 1, mask=tile < stop, other=0.0)
    tl.store(squares + 2 * parameter, tl.sum(weights, axis=0))
    tl.store(squares + 2 * parameter + 1, tl.sum(updates, axis=0))


@triton.jit
def _lamb_apply(table, shapes, tiles, numbers, factors, ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    parameter, offsets, inside, _, _, _ = _tile(shapes, tiles, numbers, ROWS, WIDTH, ALIGNED)
    weights = _address(table, parameter, 0, tl.float32, ALIGNED) + offsets
    p = tl.load(weights, mask=inside, other=0.0)
    m = tl.load(_address(table, parameter, 2, tl.float32, ALIGNED) + offsets, mask=inside, other=0.0)
    v = tl.load(_address(table, parameter, 3, tl.float32, ALIGNED) + offsets, mask=inside, other=0.0)
    tl.store(weights, p + tl.load(factors + parameter) * _lamb_update(p, m, v, numbers), mask=inside)


class Launch:
    """Where the kernels find the parameters of one group; made again only where something lies elsewhere."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._sizes: list[tuple[int, int]] = []
        self._books: tuple[Tensor, Tensor] | None = None

    def adamw(
        self,
        parameters: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        numbers: Tensor,
        seed: Tensor,
        bits: int,
    ) -> None:
        """The step of `phalanx.optim.adamw`, of fp32 parameters with gradients of one dtype; `seed`: of rounding."""
        gradients = self._update_table(parameters, states, by_rows=bits != 32)
        if self._books is None:
            pad = parameters[0].new_zeros(1)
            device = parameters[0].device
            borders = [each for signed in (True, False) for each in (quantise.border_tensor(signed, "cpu"), pad.cpu())]
            books = torch.cat([quantise.book_tensor(signed, "cpu") for signed in (True, False)])
            self._books = _sent(books, device), _sent(torch.cat(borders), device)
        if self._tiles:
            _adamw[(self._tiles,)](
                self._table, self._shapes, self._places, numbers.to(torch.float32), seed, *self._books,
                BITS=bits, GRADIENT=_type(gradients[0]), **self._constants,
            )  # fmt: skip

    def lamb_moments(
        self, parameters: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], numbers: Tensor
    ) -> Tensor:
        """Advance the moments; return the squared norms (P, [weights, update])."""
        gradients = self._update_table(parameters, states, by_rows=False)
        squares = parameters[0].new_empty(len(parameters), 2)
        sums = parameters[0].new_empty(max(self._tiles, 1), 2)
        if self._tiles:
            _lamb_moments[(self._tiles,)](
                self._table, self._shapes, self._places, numbers, sums,
                GRADIENT=_type(gradients[0]), **self._constants,
            )  # fmt: skip
        _lamb_squares[(len(parameters),)](sums, self._ranges, squares, COUNT=1024, num_warps=4)
        return squares

    def lamb_apply(self, numbers: Tensor, factors: Tensor) -> None:
        """Add the updates, each times its factor (P,), after `lamb_moments`."""
        if self._tiles:
            _lamb_apply[(self._tiles,)](
                self._table, self._shapes, self._places, numbers, factors.contiguous(), **self._constants
            )

    def _update_table(
        self, parameters: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], *, by_rows: bool
    ) -> list[Tensor]:
        """Bring the table up to date; return the gradients, which must live until the kernel is launched."""
        device = parameters[0].device
        gradients = [p.grad for p in parameters if p.grad is not None]
        addresses = []
        for p, g, state in zip(parameters, gradients, states, strict=True):
            moments = [state["exp_avg"], state["exp_avg_sq"]]
            scales = [state.get("exp_avg" + quantise.SCALE, p), state.get("exp_avg_sq" + quantise.SCALE, p)]
            addresses += [x.data_ptr() for x in (p, g, *moments, *scales)]
        sizes = [(p.shape[0], p.shape[1]) if by_rows else (min(p.numel(), 1), p.numel()) for p in parameters]
        if sizes != self._sizes:
            # Cut the parameters into tiles: (parameter, first block) of each, and the first tile of each parameter.
            self._sizes = sizes
            shapes = torch.tensor(sizes, dtype=torch.int64)
            blocks = shapes[:, 0] * ((shapes[:, 1] + _WIDTH - 1) // _WIDTH)
            counts = (blocks + _ROWS - 1) // _ROWS
            ends = counts.cumsum(0)
            owner = torch.repeat_interleave(counts)
            first = (torch.arange(len(owner)) - (ends - counts)[owner]) * _ROWS
            self._tiles = len(owner)
            self._shapes, self._places = _sent(shapes, device), _sent(torch.stack([owner, first], 1), device)
            self._ranges = _sent(torch.cat([torch.zeros(1, dtype=torch.int64), ends]), device)
        if addresses != self._addresses:
            self._addresses = addresses
            self._table = _sent(torch.tensor(addresses, dtype=torch.int64), device)
            lie_well = all(address % 16 == 0 for address in addresses) and all(m % 16 == 0 for _, m in sizes)
            self._constants: dict[str, Any] = {
                "ALIGNED": lie_well, "ROWS": _ROWS, "WIDTH": _WIDTH, "num_warps": _WARPS
            }  # fmt: skip
        return gradients


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return tensor.contiguous()
    # From pinned memory, so that the host does not wait.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def _type(gradient: Tensor) -> Any:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[gradient.dtype]
