"""Optimizer states of 8 and 16 bits: what is stored of a matrix in fp32, and how it is rounded.

8 bits: dynamic tree quantisation, block-wise (Dettmers et al., arXiv 2110.02861; the code books are those of
bitsandbytes' ``create_dynamic_map`` and of torchao's ``AdamW8bit``). A block is up to 256 neighbours of one row, never
of two: how rows are spread over ranks then changes no code, and a checkpoint of codes is taken up by any layout. Unlike
there, a second moment above zero never becomes zero, which would make its weight's next step far too large.

16 bits: bfloat16 with stochastic rounding. Rounded to the nearest, a second moment with a decay rate of 0.999 stands
still: it moves by a thousandth in a step, and its neighbours are 1/128 apart. The random bits are a hash of the step,
the column and the weight, so that they are the same in every layout, and again when a step is made again.

Shapes: N rows, M columns, K blocks of a row.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from phalanx.optim.groups import BLOCK, blocks_of

SCALE = "_scale"
"""What the name of a state's scales adds to its own."""

_WORD = 0xFFFFFFFF


@functools.cache
def code_book(signed: bool) -> tuple[float, ...]:
    """The 256 values of the codes, ascending: seven decades of 10^-6 to 1, the finer the larger, zero and one."""
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        means = [(0.1 + 0.9 * (k + 0.5) / count) * 10.0 ** (decade - 6) for k in range(count)]
        values += means + ([-value for value in means] if signed else [])
    return tuple(sorted(values))


def book_tensor(signed: bool, device: torch.device | str) -> Tensor:
    """`code_book` in fp32."""
    return torch.tensor(code_book(signed), dtype=torch.float32, device=device)


def border_tensor(signed: bool, device: torch.device | str) -> Tensor:
    """The 255 borders between codes: what is at most the border belongs to the lower one."""
    book = torch.tensor(code_book(signed), dtype=torch.float64)
    return ((book[1:] + book[:-1]) / 2).float().to(device)


def nearest_codes(unit: Tensor, *, signed: bool) -> Tensor:
    """The codes (int64) of fp32 values of at most 1.

    The upper 16 bits of a value say its code or the one below: so far apart are the borders.
    """
    borders, lowest = _lookup(signed, unit.device)
    low = lowest[(unit.view(torch.int32) >> 16 & 0xFFFF).to(torch.int64)]
    return low + (unit > borders[low])


@functools.cache
def _lookup(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    words = torch.arange(1 << 16, dtype=torch.int64) << 16
    words = torch.where(words >= 1 << 31, (words | 0xFFFF) - (1 << 32), words)  # the least of them, if it has a sign
    values = words.to(torch.int32).view(torch.float32)
    borders = border_tensor(signed, "cpu")
    return borders.to(device), torch.bucketize(values, borders).clamp(max=254).to(device)


def zero_code(signed: bool) -> int:
    """The code of zero."""
    return code_book(signed).index(0.0)


def quantise(x_NM: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (NM, uint8) and scales (NK, fp32: the largest size of a block)."""
    rows, columns = x_NM.shape
    blocks = blocks_of(columns)
    padded_NKB = torch.nn.functional.pad(x_NM, (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    scale_NK = padded_NKB.abs().amax(-1)
    unit_NKB = padded_NKB / torch.where(scale_NK > 0, scale_NK, 1.0).unsqueeze(-1)
    codes_NKB = nearest_codes(unit_NKB, signed=signed)
    if not signed:
        codes_NKB = torch.where(padded_NKB > 0, codes_NKB.clamp(min=1), codes_NKB)
    return codes_NKB.to(torch.uint8).view(rows, blocks * BLOCK)[:, :columns].contiguous(), scale_NK


def dequantise(codes_NM: Tensor, scale_NK: Tensor, *, signed: bool) -> Tensor:
    """The values of codes, fp32."""
    book = book_tensor(signed, codes_NM.device)
    scale_NM = scale_NK.repeat_interleave(BLOCK, -1)[:, : codes_NM.shape[1]]
    return book[codes_NM.to(torch.int64)] * scale_NM


def hashed(weight_NM: Tensor, seed: Tensor) -> Tensor:
    """32 random bits (int64) for each element: of its column, the upper half of its weight (fp32), and a seed.

    The lower half is left out, so that layouts whose sums differ in the last bits round alike all the same.
    """
    columns = torch.arange(weight_NM.shape[1], device=weight_NM.device)
    upper_NM = weight_NM.contiguous().view(torch.int32).to(torch.int64) & 0xFFFF0000
    return _mix(upper_NM ^ _mix(columns + seed))


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 as bfloat16: up or down in proportion to the distances, by the lowest 16 of random `bits`.

    What bfloat16 holds stays as it is, and so does what is not finite.
    """
    word = x.contiguous().view(torch.int32)
    rounded = torch.where(x.isfinite(), word + (bits & 0xFFFF).to(torch.int32), word)
    return (rounded & -65536).view(torch.float32).to(torch.bfloat16)


def step_seed(step: Tensor) -> Tensor:
    """32 bits (int64) of the number of a step, a scalar."""
    return (step.to(torch.int64) * 0x9E3779B1) & _WORD


def _mix(x: Tensor) -> Tensor:
    # The finaliser of MurmurHash3 (Austin Appleby, public domain).
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return x ^ (x >> 16)
