"""Digests of tensors by their bits, on the device where they are: two sums of 64 bits for each.

Over the words of a tensor, its bytes read as int32 in row-major order, modulo 2^64:

    plain = sum(word[i])        weighted = sum((2 * i + 1) * word[i])

One flipped bit changes a word by a power of two, and the weighted sum by an odd multiple of it, which is never 0 modulo
2^64. Two elements that change places change it by the difference of their weights times that of their values, whose
product is below 2^63 for tensors of up to 2^30 words, so never 0 either. Anything else goes unseen once in 2^64 or so
if it is not made on purpose. The sums of parts add up to that of the whole, so that a tensor which is split over ranks
has the same digest in every layout; the weight of a word is that of its place in the whole.

All of it is sums over rows and over columns of a table of words: no weights are stored, and nothing is multiplied but
these sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from phalanx.core.layout import Shard

_COLUMNS = 1024
_FEW_WORDS = 1 << 14
# Words that are widened to int64 at a time: what stays in the cache of a core, and what a GPU does in one kernel.
_CPU_WORDS, _GPU_WORDS = 1 << 17, 1 << 22


@torch.no_grad()
def digests_of(tensors: Sequence[Tensor], shards: Sequence[Shard | None] = ()) -> Tensor:
    """(tensors, 2) int64, the plain and the weighted sum of each, on the device of the first.

    Args:
        shards: which rows of a whole each of `tensors` is; by default each is a whole one. The place in the whole
            counts for elements of four bytes; of others only the place in the block does.
    """
    if not tensors:
        return torch.zeros(0, 2, dtype=torch.int64)
    blocks = shards or [None] * len(tensors)
    device = tensors[0].device
    found: list[Tensor | None] = [None] * len(tensors)
    small: dict[torch.device, list[tuple[int, Tensor, int]]] = {}
    for index, (tensor, shard) in enumerate(zip(tensors, blocks, strict=True)):
        words, first = _words(tensor), _first_word(tensor, shard)
        if words.numel() < _FEW_WORDS:
            small.setdefault(words.device, []).append((index, words, first))
        else:
            found[index] = _of_run(words, first).to(device)
    for some in small.values():
        digests = _of_runs([words for _, words, _ in some], [first for *_, first in some]).to(device)
        for (index, *_), digest in zip(some, digests.unbind(), strict=True):
            found[index] = digest
    return torch.stack([one for one in found if one is not None])


def _first_word(tensor: Tensor, shard: Shard | None) -> int:
    """Where its words begin in the whole."""
    if shard is None or tensor.element_size() != 4 or not tensor.numel():
        return 0
    assert shard.sizes[1:] == shard.shape[1:], f"a block {shard.sizes} of {shard.shape} is no run of rows"
    return shard.offsets[0] * math.prod(shard.shape[1:]) if shard.shape else 0


def _of_runs(runs: Sequence[Tensor], firsts: Sequence[int]) -> Tensor:
    """(runs, 2): `_of_run` of many short ones at once, by running sums over all of them.

    A word counts by its place g among all: 2 g + 1. In its own run, which begins at place b there and at word f of the
    whole, it is word g - b + f, so its weight is less by 2 (b - f), which is taken off times the plain sum.
    """
    lengths = [run.numel() for run in runs]
    begins = [0, *accumulate(lengths)]
    words = torch.cat(list(runs)).to(torch.int64)
    sums = words.new_zeros(2, begins[-1] + 1)
    torch.cumsum(words, 0, out=sums[0, 1:])
    torch.cumsum(words.mul_(_odd(begins[-1], 0, words)), 0, out=sums[1, 1:])
    plain, weighted = sums[:, torch.tensor(begins, device=words.device)].diff(dim=1)
    shifts = [2 * (begin - first) for begin, first in zip(begins, firsts, strict=False)]
    weighted = weighted - plain * torch.tensor(shifts, dtype=torch.int64, device=words.device)
    return torch.stack([plain, weighted], 1)


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as int32 (n,); without a copy where they lie so."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.element_size() % 4 == 0:
        return flat.view(torch.int32)
    octets = flat.view(torch.uint8)
    if octets.numel() % 4 or octets.storage_offset() % 4:
        filled = octets.new_zeros(-(-octets.numel() // 4) * 4)
        filled[: octets.numel()] = octets
        octets = filled
    return octets.view(torch.int32)


def _of_run(words: Tensor, first: int) -> Tensor:
    """(2,) of words that lie behind one another in the whole, from word `first` on."""
    # Of few words it is the number of operations that costs, so they are weighted one by one.
    in_table = words.numel() // _COLUMNS * _COLUMNS if words.numel() >= _FEW_WORDS else 0
    sums = [_of_table(words[:in_table].view(-1, _COLUMNS), first)] if in_table else []
    if in_table < words.numel() or not in_table:
        rest = words[in_table:].to(torch.int64)
        sums.append(torch.stack([rest.sum(), rest.mul_(_odd(rest.numel(), first + in_table, rest)).sum()]))
    return sums[0] if len(sums) == 1 else sums[0] + sums[1]


def _of_table(table: Tensor, first: int) -> Tensor:
    """(2,) of words [rows, columns], which begin at word `first` of the whole."""
    rows, columns = table.shape
    at_once = max((_GPU_WORDS if table.is_cuda else _CPU_WORDS) // columns, 1)
    by_column = torch.zeros(columns, dtype=torch.int64, device=table.device)
    by_row = []
    for begin in range(0, rows, at_once):
        wide = table[begin : begin + at_once].to(torch.int64)
        by_column += wide.sum(0)
        by_row.append(wide.sum(1))
    # The weight of a word, 2 (first + r columns + c) + 1, is the sum of that of its row and that of its column.
    row_weights = torch.arange(rows, dtype=torch.int64, device=table.device) * (2 * columns)
    weighted = (torch.cat(by_row) * row_weights).sum() + (by_column * _odd(columns, first, by_column)).sum()
    return torch.stack([by_column.sum(), weighted])


def _odd(count: int, first: int, like: Tensor) -> Tensor:
    return torch.arange(2 * first + 1, 2 * (first + count) + 1, 2, dtype=torch.int64, device=like.device)


def together(digests: Tensor) -> Tensor:
    """(2,): one digest of many (n, 2), for a first comparison."""
    return _of_run(_words(digests), 0)
