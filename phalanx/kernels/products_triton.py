"""Triton kernels of matrix products that wait for the rows they need, or signal the tiles they have made (Flux).

Flux (arXiv 2406.06858) fuses a tensor-parallel group's collectives with the products beside them, tile by tile:

* *Gather, then multiply*: `product_of_arriving` begins while rows are on their way. The tiles of this rank's own rows
  come first, then those of the next rank and so on, in the order in which rows are fetched; a tile waits until the
  signals of its rows have the number of this call.
* *Multiply, then scatter*: `product_to_owners` writes every tile straight into the memory of the rank whose rows it is
  of, the next rank's first and the own ones last, and signals it there. `sum_of_tiles` of the owner waits for each
  tile and adds in the order of ranks, in fp32: the same inputs give the same bits.

Signals are int32 words that hold the number of the last call that set them, so that they are never set back; a call's
number is greater than all before. A signal is written with release and read with acquire order at the scope of the
system, for writer and reader may be on different devices; it lies where it is waited for.

No process groups, no streams: memory of all ranks and what has arrived is the caller's
(`phalanx.parallel.tensor.tiles`). Under ``TRITON_INTERPRET=1`` the kernels run on a CPU, where they are tested with
the memory of several ranks in one process.

Shapes: n ranks, R rows of each, T = n R, I inputs, O outputs. Needs Triton to be imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Blocks(NamedTuple):
    """How a product is cut."""

    # rows, columns: of the tile that a program makes at a time; powers of two, at least 16
    rows: int = 128
    columns: int = 128
    inputs: int = 64  # read at a time; likewise
    group: int = 8  # rows of tiles that are made beside one another, so that they find the matrix in the cache
    warps: int = 8
    stages: int = 3  # loads on their way


class Arrivals(NamedTuple):
    """What is known of rows that are on their way."""

    signals: Tensor  # int32 (n * chunks,): of each chunk of each rank's rows, the number of the call in which it came
    chunk_rows: int  # rows of a chunk; the last one of a rank may have fewer
    call: int


class Owners(NamedTuple):
    """Where the tiles of a product go."""

    # int64 (n,): of each rank, the address of its (n, R, O) partial sums, of the type of the inputs; all addresses are
    # multiples of 16
    slots: Tensor
    signals: Tensor  # int64 (n,): of each rank, the address of its int32 (n, tiles) signals
    call: int


@triton.jit
def _await(signal, call):
    while tl.atomic_add(signal, 0, sem="acquire", scope="sys") != call:
        pass


@triton.jit
def _place(tile, first, size, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Whose rows a tile is of, from rank `first` on, and which of their rows and columns of tiles."""
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    member = (first + tile // (down * across)) % size
    within = tile % (down * across)
    top = within // (GROUP * across) * GROUP
    height = tl.minimum(down - top, GROUP)
    within = within % (GROUP * across)
    return member, top + within % height, within // height


@triton.jit
def _product(
    x, matrix, row, in_rows, column, in_columns, inputs, x_stride, in_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, inputs, INPUTS):
        k = start + tl.arange(0, INPUTS)
        k_row, k_column = k.to(tl.int64)[None, :], k.to(tl.int64)[:, None]
        a = tl.load(x + row[:, None] * x_stride + k_row, mask=in_rows[:, None] & (k_row < inputs), other=0.0)
        b = tl.load(
            matrix + k_column * in_stride + column[None, :] * out_stride,
            mask=(k_column < inputs) & in_columns[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["call", "own"])
def _product_of_arriving(
    x, matrix, bias, out, signals, call, own, size, rows, columns, inputs, x_stride, in_stride, out_stride,
    chunk_rows, chunks,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = size * tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        member, m, n = _place(tile, own, size, rows, columns, ROWS, COLUMNS, GROUP)
        if member != own:
            last = (tl.minimum((m + 1) * ROWS, rows) - 1) // chunk_rows
            for chunk in range(m * ROWS // chunk_rows, last + 1):
                _await(signals + member * chunks + chunk, call)
        of_member, column = m * ROWS + tl.arange(0, ROWS), (n * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        in_rows, in_columns = of_member < rows, column < columns
        row = member.to(tl.int64) * rows + of_member
        total = _product(
            x, matrix, row, in_rows, column, in_columns, inputs, x_stride, in_stride, out_stride,
            ROWS, COLUMNS, INPUTS, PRECISION,
        )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        where = out + row[:, None] * columns + column[None, :]
        tl.store(where, total.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit(do_not_specialize=["call", "own"])
def _product_to_owners(
    x, matrix, slots, signals, call, own, size, rows, columns, inputs, x_stride, in_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    each = tl.cdiv(rows, ROWS) * across
    for tile in range(tl.program_id(0), size * each, tl.num_programs(0)):
        member, m, n = _place(tile, own + 1, size, rows, columns, ROWS, COLUMNS, GROUP)
        of_member, column = m * ROWS + tl.arange(0, ROWS), (n * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        in_rows, in_columns = of_member < rows, column < columns
        total = _product(
            x, matrix, member.to(tl.int64) * rows + of_member, in_rows, column, in_columns, inputs,
            x_stride, in_stride, out_stride, ROWS, COLUMNS, INPUTS, PRECISION,
        )  # fmt: skip
        slot = tl.multiple_of(tl.load(slots + member).to(tl.pointer_type(x.dtype.element_ty)), 16)
        row = own.to(tl.int64) * rows + of_member  # in the owner's memory there is a block for each rank
        where = slot + row[:, None] * columns + column[None, :]
        tl.store(where, total.to(x.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])
        tl.debug_barrier()  # every thread has written its part; what one of them now releases is all of it
        signal = tl.load(signals + member).to(tl.pointer_type(tl.int32)) + own * each + m * across + n
        tl.atomic_xchg(signal, call, sem="release", scope="sys")


@triton.jit(do_not_specialize=["call"])
def _sum_of_tiles(
    slots, signals, out, call, size, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    each = tl.cdiv(rows, ROWS) * across
    for tile in range(tl.program_id(0), each, tl.num_programs(0)):
        row = (tile // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column = (tile % across * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        is_here = (row < rows)[:, None] & (column < columns)[None, :]
        where = row[:, None] * columns + column[None, :]
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        block, signal = slots, signals + tile
        for _ in range(size):
            _await(signal, call)
            total += tl.load(block + where, mask=is_here, other=0.0).to(tl.float32)
            block += rows * columns
            signal += each
        tl.store(out + where, total.to(out.dtype.element_ty), mask=is_here)


def product_of_arriving(
    x_TI: Tensor,  # contiguous; the rows of `own` are there
    matrix_IO: Tensor,  # in any layout, of the type of `x`
    bias_O: Tensor | None,
    arrivals: Arrivals,
    own: int,
    size: int,
    # at most so many run at a time. Where rows are brought by something that needs a multiprocessor of this device,
    # there must be fewer than it has: programs that wait do not make room
    programs: int,
    blocks: Blocks | None = None,
) -> Tensor:
    """``x @ matrix + bias`` (T, O), while rows of `x` of other ranks than `own` are still on their way."""
    blocks = blocks or usual_blocks(x_TI)
    assert x_TI.is_contiguous() and x_TI.dtype == matrix_IO.dtype and x_TI.shape[0] % size == 0
    rows = x_TI.shape[0] // size
    out_TO = x_TI.new_empty(x_TI.shape[0], matrix_IO.shape[1])
    tiles = size * tiles_of(rows, matrix_IO.shape[1], blocks)
    if tiles:
        _product_of_arriving[(min(programs, tiles),)](
            x_TI, matrix_IO, x_TI if bias_O is None else bias_O.contiguous(), out_TO, arrivals.signals, arrivals.call,
            own, size, rows, matrix_IO.shape[1], x_TI.shape[1], x_TI.stride(0), *matrix_IO.stride(),
            arrivals.chunk_rows, -(-rows // arrivals.chunk_rows), HAS_BIAS=bias_O is not None,
            **_cut(blocks, x_TI),
        )  # fmt: skip
    return out_TO


def product_to_owners(
    x_TI: Tensor, matrix_IO: Tensor, owners: Owners, own: int, size: int, programs: int, blocks: Blocks | None = None
) -> None:
    """Write ``x @ matrix`` (T, O) into the memory of the ranks whose rows it is of, and signal each tile there.

    Arguments as of `product_of_arriving`; none of the programs waits.
    """
    blocks = blocks or usual_blocks(x_TI)
    assert x_TI.is_contiguous() and x_TI.dtype == matrix_IO.dtype and x_TI.shape[0] % size == 0
    rows = x_TI.shape[0] // size
    tiles = size * tiles_of(rows, matrix_IO.shape[1], blocks)
    if tiles:
        _product_to_owners[(min(programs, tiles),)](
            x_TI, matrix_IO, owners.slots, owners.signals, owners.call, own, size, rows, matrix_IO.shape[1],
            x_TI.shape[1], x_TI.stride(0), *matrix_IO.stride(), **_cut(blocks, x_TI),
        )  # fmt: skip


def sum_of_tiles(slots_nRO: Tensor, signals: Tensor, call: int, programs: int, blocks: Blocks | None = None) -> Tensor:
    """The sum over ranks of what they have written here, (R, O); waits for each tile, and adds in the order of ranks.

    At most so many `programs` run at a time, all of which may wait; `blocks` are those of the products.
    """
    blocks = blocks or usual_blocks(slots_nRO)
    size, rows, columns = slots_nRO.shape
    out_RO = slots_nRO.new_empty(rows, columns)
    if tiles := tiles_of(rows, columns, blocks):
        _sum_of_tiles[(min(programs, tiles),)](
            slots_nRO, signals, out_RO, call, size, rows, columns, ROWS=blocks.rows, COLUMNS=blocks.columns,
            num_warps=blocks.warps,
        )  # fmt: skip
    return out_RO


def tiles_of(rows: int, columns: int, blocks: Blocks) -> int:
    """Tiles of one rank's rows."""
    return -(-rows // blocks.rows) * -(-columns // blocks.columns)


def usual_blocks(like: Tensor) -> Blocks:
    """For tensors of this type: fp32 takes twice the room."""
    return Blocks() if like.element_size() < 4 else Blocks(inputs=32)


def _cut(blocks: Blocks, like: Tensor) -> dict[str, Any]:
    reduced = torch.backends.cuda.matmul.allow_tf32 and like.is_cuda
    return {
        "ROWS": blocks.rows, "COLUMNS": blocks.columns, "INPUTS": blocks.inputs, "GROUP": blocks.group,
        "PRECISION": "tf32" if reduced else "ieee", "num_warps": blocks.warps, "num_stages": blocks.stages,
    }  # fmt: skip
