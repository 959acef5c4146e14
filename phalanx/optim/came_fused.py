"""CAME's step over one matrix as compiled passes: each walks the matrix once, without a buffer of its size.

A compiler for CPUs makes one loop of sums over columns and one of sums over rows, so that a matrix would be read twice
by each pass, and the second time across its rows. Here the rows are dealt to R stacks that are walked abreast: in one
loop the squares are summed along each stack's row, and over the stacks into a matrix R times smaller, of which the sum
over rows is then cheap. More than four stacks were slower: too many streams for one core's cache.

Shapes: N = R K rows in R stacks of K rows, M columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

STACKS = 4


class Numbers(NamedTuple):
    """The settings of a step as scalar tensors: Python numbers would be converted at every element."""

    to_average: Tensor
    to_square: Tensor
    to_instability: Tensor
    eps: Tensor
    eps_residual: Tensor
    clip_threshold: Tensor
    minus_lr: Tensor
    shrink: Tensor


class Matrix(NamedTuple):
    """A parameter, its gradient, its average (NM) and the factors of its state (N, M, N, M)."""

    p: Tensor
    g: Tensor
    m: Tensor
    row: Tensor
    col: Tensor
    res_row: Tensor
    res_col: Tensor


def stacks_of(rows: int) -> int:
    """How many stacks the rows are dealt to: 4, 2 or 1, where 1 is not worth it."""
    return next(n for n in (STACKS, 2, 1) if rows % n == 0)


class FusedStep:
    """The compiled passes; sizes are symbols, so that matrices of all shapes with as many stacks share them.

    Rows are always given as RK: where a length of N and one of M are equal, a square matrix would be compiled anew.
    """

    def __init__(self) -> None:
        passes = (_squares, _advance, _clip, _average, _apply)
        self._squares, self._advance, self._clip, self._average, self._apply = (_compiled(each) for each in passes)
        self._ones: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}

    def __call__(self, matrix: Matrix, numbers: Numbers, keep: Tensor | None) -> None:
        """Update parameter and state in place, or leave them where `keep` is false (the gradient is then zero)."""
        rows, columns = matrix.p.shape
        stacks = stacks_of(rows)
        p_RKM, g_RKM, m_RKM = (x.view(stacks, rows // stacks, columns) for x in (matrix.p, matrix.g, matrix.m))
        row_RK, res_row_RK = (x.view(stacks, rows // stacks) for x in (matrix.row, matrix.res_row))
        # Sums over rows stay outside: compiled, they are four times slower than torch's own.
        over_KM, over_RK = self._squares(g_RKM, self._ones_of(matrix.p))
        scales = self._advance(over_RK, over_KM.sum(0), row_RK, matrix.col, numbers.to_square, numbers.eps, keep)
        scale_RK = self._clip(g_RKM, *scales, numbers)
        over_KM, over_RK = self._average(g_RKM, m_RKM.unbind(0), scale_RK, scales[1], numbers, keep)
        rate, eps = numbers.to_instability, numbers.eps_residual
        scales = self._advance(over_RK, over_KM.sum(0), res_row_RK, matrix.res_col, rate, eps, keep)
        self._apply(p_RKM, m_RKM, *scales, numbers, keep)

    def _ones_of(self, like: Tensor) -> Tensor:
        kind = (like.device, like.dtype, like.shape[-1])
        if kind not in self._ones:
            self._ones[kind] = like.new_ones(like.shape[-1])
        return self._ones[kind]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True, fullgraph=True)
    return compiled


def _squares(g_RKM: Tensor, ones_M: Tensor) -> tuple[Tensor, Tensor]:
    """Squares summed over stacks (KM) and along rows (RK), in one loop.

    The ones keep it so: without a vector over columns the compiler makes one loop of K and M, which does not fuse
    with sums along rows; nor does it fuse where the sums are worked on further, so `_advance` is a graph of its own.
    """
    squares = [g_KM.square() for g_KM in g_RKM.unbind(0)]
    return _sum(squares) * ones_M, torch.stack([s.sum(-1) for s in squares])


def _advance(
    over_RK: Tensor, over_M: Tensor, row_RK: Tensor, col_M: Tensor, rate: Tensor, eps: Tensor, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Move row and column means towards those of new squares; return the two factors of ``1 / sqrt(v)``."""
    new_row_RK = _moved(row_RK, over_RK / over_M.numel() + eps, rate, keep)
    new_col_M = _moved(col_M, over_M / over_RK.numel() + eps, rate, keep)
    row_RK.copy_(new_row_RK)
    col_M.copy_(new_col_M)
    return (new_row_RK.mean() / new_row_RK).sqrt(), new_col_M.rsqrt()


def _clip(g_RKM: Tensor, scale_RK: Tensor, scale_M: Tensor, numbers: Numbers) -> Tensor:
    """The rows' factor of the clipped update, from that of the unclipped one."""
    pairs = zip(g_RKM.unbind(0), scale_RK.unbind(0), strict=True)
    squares = [(g_KM * s_K.unsqueeze(-1)).square() for g_KM, s_K in pairs]
    mean = (_sum(squares) * scale_M.square()).sum(-1).sum() / g_RKM.numel()
    return scale_RK / (mean.sqrt() / numbers.clip_threshold).clamp(min=1.0)


def _average(
    g_RKM: Tensor, ms_KM: Sequence[Tensor], scale_RK: Tensor, scale_M: Tensor, numbers: Numbers, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Advance the average; return the squares of its distance to the update, summed as in `_squares`."""
    us_KM = [g * s.unsqueeze(-1) * scale_M for g, s in zip(g_RKM.unbind(0), scale_RK.unbind(0), strict=True)]
    news_KM = [_moved(m, u, numbers.to_average, keep) for m, u in zip(ms_KM, us_KM, strict=True)]
    squares = [(u - m).square() for u, m in zip(us_KM, news_KM, strict=True)]
    for m, new in zip(ms_KM, news_KM, strict=True):
        m.copy_(new)
    return _sum(squares), torch.stack([s.sum(-1) for s in squares])


def _apply(
    p_RKM: Tensor, m_RKM: Tensor, scale_RK: Tensor, scale_M: Tensor, numbers: Numbers, keep: Tensor | None
) -> None:
    new = p_RKM * numbers.shrink + m_RKM * (scale_RK * numbers.minus_lr).unsqueeze(-1) * scale_M
    p_RKM.copy_(new if keep is None else torch.where(keep, new, p_RKM))


def _sum(terms: list[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else _sum(terms[: len(terms) // 2]) + _sum(terms[len(terms) // 2 :])


def _moved(average: Tensor, value: Tensor, weight: Tensor, keep: Tensor | None) -> Tensor:
    new = average + weight * (value - average)
    return new if keep is None else torch.where(keep, new, average)
