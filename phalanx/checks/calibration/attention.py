"""Attention as a layer calls it, over the length of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.checks.calibration.both_ways import both_ways
from phalanx.checks.calibration.contract import ATTENTION_HEADS, Precision
from phalanx.checks.calibration.stopwatch import Case, Pool
from phalanx.kernels.attention import CausalKernel, attention
from phalanx.kernels.attention_trial import KERNELS, Shape, find_fault
from phalanx.kernels.masks import AttentionMask

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def cases(
    tokens: int, queries: Sequence[int], head_dims: Sequence[int], precision: Precision, pool: Pool
) -> list[Case]:
    """Forward and backward passes over `tokens` in sequences of each length, at least one of them."""
    found = []
    for size in head_dims:
        for length in queries:
            found += _case(max(1, tokens // length), length, size, precision, pool)
    return found


def _case(batch: int, length: int, size: int, precision: Precision, pool: Pool) -> list[Case]:
    mask = AttentionMask(length, length, documents_BS=_documents(batch, length, pool.device))
    sizes = {"batch": batch, "heads": ATTENTION_HEADS, "queries": length, "head_dim": size}

    kernel = _kernel(
        Shape(batch, ATTENTION_HEADS, ATTENTION_HEADS, length, size, _DTYPES[precision], "all"), pool.device
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask, kernel=kernel)

    def make() -> list[Tensor]:
        stacked = pool.take(batch, length, 3 * ATTENTION_HEADS, size)
        return [x.transpose(1, 2) for x in torch.split(stacked, ATTENTION_HEADS, dim=2)]

    return both_ways("attention", sizes, precision, attend, make)


def _kernel(shape: Shape, device: torch.device) -> CausalKernel | None:
    """What a run on a GPU finds by its trial; without kernels that are compiled for each length."""
    if device.type != "cuda":
        return None
    tried = (name for name in KERNELS if name != "flex" and not find_fault(name, shape, device))
    return CausalKernel(next(tried), shape.length)


def _documents(batch: int, length: int, device: torch.device) -> Tensor | None:
    """On a CPU two documents in each sequence, which training keeps apart by default; the mask is made once, as for all
    layers of a step. On a GPU a kernel would be compiled for each length, which takes longer than all that is measured.
    """
    if device.type != "cpu":
        return None
    border = length // 3
    return (torch.arange(length) >= border).int().expand(batch, length)
