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

from phalanx.kernels import attention_aten
from phalanx.kernels.masks import AttentionMask

Engine = Literal["flash", "matmul"]

# Elements of the key gradients that one call of the flash kernel makes for a run of blocks.
_RUN_ELEMENTS = 1 << 24


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


@dataclass(frozen=True)
class _Run:
    """Neighbouring blocks of one shape: each starts ``step`` positions after the one before, in queries and in keys."""

    queries: slice
    keys: slice
    rows: slice
    step: int
    count: int = 1

    def joined(self, other: _Run) -> _Run:
        """This run and the one block that follows it."""
        queries, keys = slice(self.queries.start, other.queries.stop), slice(self.keys.start, other.keys.stop)
        return _Run(queries, keys, slice(self.rows.start, other.rows.stop), self.step, self.count + 1)

    def first(self) -> tuple[slice, slice]:
        """Queries and keys of the first block."""
        back = (self.count - 1) * self.step
        return slice(self.queries.start, self.queries.stop - back), slice(self.keys.start, self.keys.stop - back)


def _runs(plan: _Plan, most: int) -> list[_Run]:
    """The blocks, with up to ``most`` of one shape and one mask joined, so that a kernel call does many."""
    runs: list[_Run] = []
    for queries, keys in plan.blocks():
        run = _Run(queries, keys, plan.rows(queries), plan.chunk)
        last = runs[-1] if runs else None
        if last is not None and plan.mask.documents_BS is None and last.count < most and _follows(last, run):
            runs[-1] = last.joined(run)
        else:
            runs.append(run)
    return runs


def _follows(last: _Run, run: _Run) -> bool:
    queries, keys = last.first()
    shift = last.count * last.step
    moved = [slice(s.start + shift, s.stop + shift) for s in (queries, keys)]
    return moved == [run.queries, run.keys]


def _blocks_of(x_BHSE: Tensor, rows: slice, run: _Run) -> list[Tensor]:
    """Views of a run's blocks: all samples of a single block, or for every sample (count, H, length, E)."""
    if run.count == 1:
        return [x_BHSE[:, :, rows]]
    length = rows.stop - rows.start - (run.count - 1) * run.step
    return [x[:, rows].unfold(1, length, run.step).permute(1, 0, 3, 2) for x in x_BHSE]


def _add_blocks(total_BHSE: Tensor, sample: int, run: _Run, part: Tensor) -> None:
    """Add a run's key gradients, whose blocks overlap, in strips that do not."""
    if run.count == 1:
        total_BHSE[:, :, run.keys] += part
        return
    rows, reach = total_BHSE[sample, :, run.keys], (run.count - 1) * run.step
    for start in range(0, part.shape[2], run.step):
        width = min(run.step, part.shape[2] - start)
        strips = rows[:, start : start + reach + width].unfold(1, width, run.step).permute(1, 0, 3, 2)
        strips += part[:, :, start : start + width]


def _flash_runs(plan: _Plan, k: Tensor) -> list[_Run]:
    """Runs of as many blocks as bounded memory allows: every call waits for all threads, so fewer calls are faster."""
    keys = plan.chunk + (plan.mask.window or plan.mask.key_length)
    return _runs(plan, max(1, _RUN_ELEMENTS // (k.shape[1] * keys * k.shape[3])))


class _Flash(torch.autograd.Function):
    """Blocks through torch's CPU flash kernel; the log-sum-exps are kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        B, H, S, E = q.shape
        out = torch.empty(B, S, H, E, dtype=q.dtype, device=q.device).transpose(1, 2)
        kept = []
        for run in _flash_runs(plan, k):
            bias = plan.mask.bias(*run.first(), q.dtype, q.device)
            views = (
                _blocks_of(x, rows, run) for x, rows in ((out, run.rows), (q, run.rows), (k, run.keys), (v, run.keys))
            )
            for out_, q_, k_, v_ in zip(*views, strict=True):
                result, lse = attention_aten.cpu_forward(q_, k_, v_, bias, plan.scale)
                out_.copy_(result)
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
        lses = iter(kept)
        for run in _flash_runs(plan, k):
            bias = plan.mask.bias(*run.first(), q.dtype, q.device)
            by_query = (_blocks_of(x, run.rows, run) for x in (dq, out, grad, q))
            by_key = (_blocks_of(x, run.keys, run) for x in (k, v))
            for sample, (dq_, out_, g_, q_, k_, v_) in enumerate(zip(*by_query, *by_key, strict=True)):
                parts = attention_aten.cpu_backward(g_, q_, k_, v_, out_, next(lses), bias, plan.scale)
                dq_.copy_(parts[0])
                _add_blocks(dk, sample, run, parts[1])
                _add_blocks(dv, sample, run, parts[2])
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
    if engine == "flash" and not attention_aten.is_available():
        engine = "matmul"
    function = _Flash if engine == "flash" else _Matmul
    out: Tensor = function.apply(q_BHSE, k_BGKE, v_BGKE, _Plan(mask, scale, chunk))  # type: ignore[no-untyped-call]
    return out
