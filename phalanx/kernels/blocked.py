"""Exact attention on a CPU, a block of queries at a time, each over just the keys it can see.

Two engines do the work of a block. ``flash`` runs torch's CPU flash kernel and keeps only the log-sum-exp; it is the
faster one in fp32. ``matmul`` writes the probabilities out with matrix products and keeps them for the backward; in
bf16 it is two to four times faster than the flash kernel up to a few hundred tokens (docs/kernels.md has the figures),
at the price of the probabilities' memory.

Autograd over slices of k and v would make a full-size gradient for every block; here every block's gradient is added
in place to its rows. Shapes: B batch, S queries, K keys, H query heads, G key/value heads, R = H / G, E head size,
C queries of a block, W keys of a block, N = B G.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.kernels import flash_cpu
from phalanx.kernels.masks import AttentionMask

Engine = Literal["flash", "matmul"]


@dataclass(frozen=True)
class _Plan:
    """What both passes of one call need beside tensors."""

    mask: AttentionMask
    scale: float
    chunk: int

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """The positions of each block's queries and of the keys that they can see."""
        mask = self.mask
        for start in range(mask.key_length - mask.query_length, mask.key_length, self.chunk):
            stop = min(start + self.chunk, mask.key_length)
            first = 0 if mask.window is None else max(0, start - mask.window + 1)
            yield slice(start, stop), slice(first, stop)

    def rows(self, queries: slice) -> slice:
        """Where a block's queries lie in the query tensor."""
        past = self.mask.key_length - self.mask.query_length
        return slice(queries.start - past, queries.stop - past)


class _Flash(torch.autograd.Function):
    """Blocks through torch's CPU flash kernel; the log-sum-exps are kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        B, H, S, E = q.shape
        out = torch.empty(B, S, H, E, dtype=q.dtype, device=q.device).transpose(1, 2)
        kept = []
        for queries, keys in plan.blocks():
            rows, bias = plan.rows(queries), plan.mask.bias(queries, keys, q.dtype, q.device)
            out[:, :, rows], lse = flash_cpu.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], bias, plan.scale)
            kept.append(lse)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, *kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, *kept = ctx.saved_tensors
        plan: _Plan = ctx.plan
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (queries, keys), lse in zip(plan.blocks(), kept, strict=True):
            rows, bias = plan.rows(queries), plan.mask.bias(queries, keys, q.dtype, q.device)
            block = (grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows])
            dq[:, :, rows], dk_part, dv_part = flash_cpu.backward(*block, lse, bias, plan.scale)
            dk[:, :, keys] += dk_part
            dv[:, :, keys] += dv_part
        return dq, dk, dv, None


def _fold(x_BHSE: Tensor, groups: int) -> Tensor:
    """(B, H, S, E) -> (N, R, S, E): the query heads that share a key head side by side, in dense memory."""
    B, H, S, E = x_BHSE.shape
    return x_BHSE.reshape(B * groups, H // groups, S, E)


def _rows_of(x_NRSE: Tensor, rows: slice) -> Tensor:
    """(N, R C, E): a block's queries of all heads that share a key head; a view when there is one such head."""
    return x_NRSE[:, :, rows].flatten(1, 2)


def _folded_bias(bias: Tensor, batch: int, groups: int, repeats: int) -> Tensor:
    """(B or 1, 1, C, W) -> (N or 1, R C, W), to go with folded heads."""
    bias = bias.repeat(1, 1, repeats, 1) if repeats > 1 else bias
    if bias.shape[0] == 1:
        return bias[0]
    return bias.expand(batch, groups, *bias.shape[2:]).reshape(batch * groups, *bias.shape[2:])


class _Sum:
    """The sum over blocks of a gradient's rows; a first block that covers all rows is taken as it is."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.total: Tensor | None = None

    def add(self, rows: slice, part: Tensor) -> None:
        if self.total is None:
            if part.shape == self.like.shape:
                self.total = part
                return
            self.total = torch.zeros_like(self.like)
        self.total[:, rows] += part

    def whole(self) -> Tensor:
        assert self.total is not None, "a gradient of no blocks"
        return self.total


class _Matmul(torch.autograd.Function):
    """Blocks through matrix products; the probabilities are kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        (B, H, S, E), G = q.shape, k.shape[1]
        queries_, keys_, values_ = _fold(q, G), k.flatten(0, 1), v.flatten(0, 1)
        out = torch.empty(B, S, H, E, dtype=q.dtype, device=q.device).transpose(1, 2)
        kept = []
        for queries, keys in plan.blocks():
            rows, bias = plan.rows(queries), plan.mask.bias(queries, keys, q.dtype, q.device)
            transposed = keys_[:, keys].transpose(1, 2)
            bias = _folded_bias(bias, B, G, H // G)
            scores = torch.baddbmm(bias, _rows_of(queries_, rows), transposed, alpha=plan.scale)
            probabilities = torch.softmax(scores, dim=-1)
            out[:, :, rows] = torch.bmm(probabilities, values_[:, keys]).view(B, H, -1, E)
            kept.append(probabilities)
        ctx.plan = plan
        ctx.save_for_backward(queries_, keys_, values_, *kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, *kept = ctx.saved_tensors
        plan: _Plan = ctx.plan
        (B, H, S, E), G, K = grad.shape, k.shape[0] // grad.shape[0], k.shape[1]
        grads = _fold(grad, G)
        dq, dk, dv = torch.empty_like(q), _Sum(k), _Sum(v)
        for (queries, keys), probabilities in zip(plan.blocks(), kept, strict=True):
            rows = plan.rows(queries)
            block_grad = _rows_of(grads, rows)
            dv.add(keys, torch.bmm(probabilities.transpose(1, 2), block_grad))
            d_probabilities = torch.bmm(block_grad, v[:, keys].transpose(1, 2))
            d_scores = torch.ops.aten._softmax_backward_data(d_probabilities, probabilities, -1, q.dtype)
            dq[:, :, rows] = torch.bmm(d_scores, k[:, keys]).mul_(plan.scale).view(B * G, H // G, -1, E)
            dk.add(keys, torch.bmm(d_scores.transpose(1, 2), _rows_of(q, rows)))
        dk_whole = dk.whole().mul_(plan.scale).view(B, G, K, E)
        return dq.view(B, H, S, E), dk_whole, dv.whole().view(B, G, K, E), None


def blocked_attention(
    q_BHSE: Tensor, k_BGKE: Tensor, v_BGKE: Tensor, mask: AttentionMask, *, scale: float, chunk: int, engine: Engine
) -> Tensor:
    """Attention of ``chunk`` queries at a time, each block over the keys that its mask lets it see.

    Args:
        q_BHSE: queries, the last S positions of the keys.
        k_BGKE: keys.
        v_BGKE: values.
        mask: which keys are seen; every query must see at least itself.
        scale: factor of the scores.
        chunk: queries per block.
        engine: ``flash`` or ``matmul``; ``flash`` falls back to ``matmul`` where torch lacks the operators.

    Returns:
        (B, H, S, E), stored as (B, S, H, E), so that joining the heads copies nothing.
    """
    if engine == "flash" and not flash_cpu.is_available():
        engine = "matmul"
    function = _Flash if engine == "flash" else _Matmul
    out: Tensor = function.apply(q_BHSE, k_BGKE, v_BGKE, _Plan(mask, scale, chunk))  # type: ignore[no-untyped-call]
    return out
