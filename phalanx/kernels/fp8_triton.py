"""The Triton twins of what `phalanx.kernels.fp8` does to whole tensors: a transpose, and weights in both layouts.

Both go through tiles, so that memory is read and written in whole lines; a plain strided copy of bytes writes one of
them at a time, which took a twentieth of an 8-bit step on an H200 for the weights alone (docs/kernels.md).

This module needs Triton to be imported. Under ``TRITON_INTERPRET=1`` its kernels run on a CPU, which is how they are
tested where there is no GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TRANSPOSED_TILE = 128
_WEIGHT_TILE = 64


@triton.jit
def _transpose(x, out, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0)
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    tl.store(out + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(tile), mask=inside)


def transposed(x_MN: Tensor) -> Tensor:
    """The transpose (N, M), row-major, of a row-major tensor of 8-bit elements."""
    rows, columns = x_MN.shape
    out = torch.empty(columns, rows, dtype=x_MN.dtype, device=x_MN.device)
    if out.numel():
        tile = _TRANSPOSED_TILE
        _transpose[(triton.cdiv(rows, tile), triton.cdiv(columns, tile))](
            x_MN.view(torch.uint8), out.view(torch.uint8), rows, columns, TILE=tile, num_warps=8
        )
    return out


@triton.jit
def _quantise_weight(weight, inverse, stored, transposed, rows, columns, stride, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(weight + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)
    # By way of bf16, as those have the weight that gathered it from other ranks.
    x = x.to(tl.bfloat16).to(tl.float32) * tl.load(inverse)
    codes = x.to(tl.float8e4nv)
    tl.store(stored + row.to(tl.int64)[:, None] * columns + column[None, :], codes, mask=inside)
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    turned = tl.trans(codes)
    tl.store(transposed + column.to(tl.int64)[:, None] * rows + row[None, :], turned, mask=inside)


def quantise_weight(weight: Tensor, inverse: Tensor, stored: Tensor, transposed: Tensor) -> None:
    """Fill `stored` (O, I) and `transposed` (I, O) with ``weight * inverse`` in E4M3; `inverse`: fp32."""
    rows, columns = weight.shape
    tile = _WEIGHT_TILE
    _quantise_weight[(triton.cdiv(rows, tile), triton.cdiv(columns, tile))](
        weight, inverse, stored, transposed, rows, columns, weight.stride(0), TILE=tile, num_warps=8
    )
