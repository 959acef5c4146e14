"""The Triton twin of `phalanx.kernels.loss`: one program for each row of logits.

A row is read once for its log-sum-exp (in one pass, with a running greatest: Milakov and Gimelshein, arXiv 1805.02867)
and, for the gradient, again, which finds it in the L2 cache since the same program has just read it; the gradient goes
where the logits were. All arithmetic is fp32, whatever the type of the logits, and no row has an fp32 copy.

A target that is no word gives a loss of NaN: a kernel cannot raise, and a wrong number must not pass for a loss.

This module needs Triton to be imported. Under ``TRITON_INTERPRET=1`` its kernels run on a CPU, which is how they are
tested where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_MOST = 4096
"""Columns at a time: 16 a thread where a program has 8 warps."""


@triton.jit
def _capped(x, softcap, CAPPED: tl.constexpr):
    """Logits in fp32 after the soft cap, and its derivative; tanh(y) = 2 s(2y) - 1, and 1 - tanh(y)^2 = 4 s (1 - s)."""
    x = x.to(tl.float32)
    slope = 1.0
    if CAPPED:
        s = 1.0 / (1.0 + tl.exp(-2.0 * x / softcap))
        x = softcap * (2.0 * s - 1.0)
        slope = 4.0 * s * (1.0 - s)
    return x, slope


@triton.jit
def _log_sum_exp(row, words, softcap, BLOCK: tl.constexpr, CAPPED: tl.constexpr):
    greatest = float("-inf")
    total = 0.0
    for start in range(0, words, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x, _ = _capped(tl.load(row + columns, mask=columns < words, other=0.0), softcap, CAPPED)
        x = tl.where(columns < words, x, float("-inf"))
        higher = tl.maximum(greatest, tl.max(x, axis=0))
        # a row of nothing but -inf has no words yet, and -inf less itself would be NaN
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(greatest - base) + tl.sum(tl.exp(x - base), axis=0)
        greatest = higher
    return greatest + tl.log(total)


@triton.jit
def _target_logit(row, target, words, softcap, CAPPED: tl.constexpr):
    is_here = (target >= 0) & (target < words)
    x, _ = _capped(tl.load(row + tl.where(is_here, target, 0), mask=is_here, other=0.0), softcap, CAPPED)
    return x, is_here


@triton.jit
def _write_gradient(row, lse, target, weight, words, width, softcap, z_loss, BLOCK: tl.constexpr, CAPPED: tl.constexpr):
    factor = weight * (1.0 + 2.0 * z_loss * lse)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x, slope = _capped(tl.load(row + columns, mask=columns < words, other=0.0), softcap, CAPPED)
        grad = tl.exp(x - lse) * factor - tl.where(columns == target, weight, 0.0)
        grad = tl.where(columns < words, grad * slope, 0.0)
        tl.store(row + columns, grad.to(row.dtype.element_ty), mask=columns < width)


@triton.jit
def _row_losses(
    logits, targets, weights, losses, lses, stride, words, width, softcap, z_loss,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    target = tl.load(targets + token)
    hit, is_word = _target_logit(row, target, words, softcap, CAPPED)
    lse = _log_sum_exp(row, words, softcap, BLOCK, CAPPED)
    tl.store(losses + token, tl.where(is_word, lse - hit, float("nan")))
    tl.store(lses + token, lse)
    if GRADIENT:
        tl.debug_barrier()  # every warp has the target's logit before any of them writes over it
        weight = tl.load(weights + token)
        _write_gradient(row, lse, target, weight, words, width, softcap, z_loss, BLOCK, CAPPED)


@triton.jit
def _row_statistics(logits, targets, lses, hits, stride, words, softcap, BLOCK: tl.constexpr, CAPPED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    hit, is_here = _target_logit(row, tl.load(targets + token), words, softcap, CAPPED)
    tl.store(hits + token, tl.where(is_here, hit, 0.0))
    tl.store(lses + token, _log_sum_exp(row, words, softcap, BLOCK, CAPPED))


@triton.jit
def _row_gradient(
    logits, targets, weights, lses, stride, words, width, softcap, z_loss, BLOCK: tl.constexpr, CAPPED: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    row, lse = logits + token * stride, tl.load(lses + token)
    target, weight = tl.load(targets + token), tl.load(weights + token)
    _write_gradient(row, lse, target, weight, words, width, softcap, z_loss, BLOCK, CAPPED)


def row_losses_(
    logits_CV: Tensor,
    targets_C: Tensor,
    weights_C: Tensor,
    words: int,
    softcap: float,
    z_loss: float,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp (C,) of whole rows; if needed, the gradient is written over the logits."""
    losses_C, lse_C = (logits_CV.new_empty(len(logits_CV), dtype=torch.float32) for _ in range(2))
    if len(logits_CV):
        _row_losses[(len(logits_CV),)](
            logits_CV, targets_C.contiguous(), weights_C.contiguous(), losses_C, lse_C, logits_CV.stride(0),
            words, logits_CV.shape[1], softcap, z_loss, GRADIENT=needs_gradient,
            **_tiles(logits_CV, words, softcap),
        )  # fmt: skip
    return losses_C, lse_C


def row_statistics(logits_CV: Tensor, targets_C: Tensor, words: int, softcap: float) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and the target's logit (C,) of the columns that are here: -inf and 0 where none is a word."""
    lse_C, target_C = (logits_CV.new_empty(len(logits_CV), dtype=torch.float32) for _ in range(2))
    if len(logits_CV):
        _row_statistics[(len(logits_CV),)](
            logits_CV, targets_C.contiguous(), lse_C, target_C, logits_CV.stride(0), words, softcap,
            **_tiles(logits_CV, words, softcap),
        )  # fmt: skip
    return lse_C, target_C


def row_gradient_(
    logits_CV: Tensor,
    lse_C: Tensor,
    targets_C: Tensor,
    weights_C: Tensor,
    words: int,
    softcap: float,
    z_loss: float,
) -> None:
    """Write the gradient over the logits that are here, given the log-sum-exp (C,) over those of all ranks."""
    if len(logits_CV):
        _row_gradient[(len(logits_CV),)](
            logits_CV, targets_C.contiguous(), weights_C.contiguous(), lse_C.contiguous(), logits_CV.stride(0),
            words, logits_CV.shape[1], softcap, z_loss, **_tiles(logits_CV, words, softcap),
        )  # fmt: skip


def _tiles(logits_CV: Tensor, words: int, softcap: float) -> dict[str, Any]:
    """How a row is cut, and by how many warps; rows must lie one word beside the other."""
    assert logits_CV.stride(1) == 1 and logits_CV.shape[1] >= words
    block = min(_BLOCK_MOST, triton.next_power_of_2(logits_CV.shape[1]))
    return {"BLOCK": block, "CAPPED": bool(softcap), "num_warps": min(8, max(1, block // 512))}
