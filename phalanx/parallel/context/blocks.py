"""Attention of some queries to some keys, in pieces that are put together by their log-sum-exp.

With S = scale Q K^T, a softmax over all keys is made of softmaxes over pieces of them: each gives its output and the
log-sum-exp of its scores, and pieces add up with weights exp(lse - total). In the backward pass every piece needs only
the final output and log-sum-exp (FlashAttention, arXiv 2205.14135, section 3.1; ring attention, arXiv 2310.01889).

Shapes: B batch, H query heads, G key/value heads (dividing H), S queries, K keys, E head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels import flash_cpu
from phalanx.kernels.attention import AttentionDropout
from phalanx.kernels.counter import keep_mask
from phalanx.parallel.context.split import Piece

# Finite, so that a query that sees none of a piece's keys gets weight exp(-1e30 - lse) = 0 instead of NaN.
_UNSEEN = -1e30


class Block:
    """Queries and keys of one piece of attention; layers of one kind share it in a forward pass.

    Args:
        queries, keys: their positions.
        window: keys that a query sees; None: all of the past.
        documents_BS: of the whole sequence; attention stays inside a document. None: one document.
    """

    def __init__(self, queries: Piece, keys: Piece, window: int | None, documents_BS: Tensor | None) -> None:
        self.queries, self.keys, self.window, self.documents_BS = queries, keys, window, documents_BS
        self._bias: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def bias(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What is added to the scores, (B or 1, 1, S, K): 0 where seen, a very negative number elsewhere."""
        if (dtype, device) not in self._bias:
            self._bias[dtype, device] = self._make_bias(dtype, device)
        return self._bias[dtype, device]

    def _make_bias(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.documents_BS is None and self.queries.sees_all(self.keys, self.window):
            zero = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
            return zero.expand(1, 1, self.queries.length, self.keys.length)
        i = torch.arange(self.queries.start, self.queries.stop, device=device)[:, None]
        j = torch.arange(self.keys.start, self.keys.stop, device=device)[None, :]
        seen = j <= i
        if self.window is not None:
            seen = seen & (i - j < self.window)
        seen = seen[None, None]
        if self.documents_BS is not None:
            documents = self.documents_BS.to(device)
            mine = documents[:, self.queries.start : self.queries.stop, None]
            seen = seen & (mine == documents[:, None, self.keys.start : self.keys.stop])[:, None]
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, _UNSEEN)


class Partial(NamedTuple):
    """Output (B, H, S, E) and fp32 log-sum-exp (B, H, S) over the keys seen so far."""

    out: Tensor
    lse: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float, dropout: AttentionDropout | None = None
) -> Partial:
    """Attention of a block's queries to its keys alone."""
    bias = block.bias(q.dtype, q.device)
    if _by_flash(q, dropout):
        return Partial(*flash_cpu.forward(q, k, v, bias, scale))
    scores = _scores(q, k, bias, scale)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse[..., None]).exp()
    kept = _kept(probabilities, block, dropout)
    weights = probabilities if kept is None else probabilities * kept
    return Partial(weights.to(q.dtype) @ _expanded(v, q), lse)


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    final: Partial,
    block: Block,
    scale: float,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through this block, given the output and log-sum-exp over *all* keys."""
    bias = block.bias(q.dtype, q.device)
    if _by_flash(q, dropout):
        return flash_cpu.backward(grad, q, k, v, final.out, final.lse, bias, scale)
    probabilities = (_scores(q, k, bias, scale) - final.lse[..., None]).exp()
    kept = _kept(probabilities, block, dropout)
    weights = probabilities if kept is None else probabilities * kept
    dv = weights.to(q.dtype).transpose(-1, -2) @ grad
    dp = _wide(grad @ _expanded(v, q).transpose(-1, -2))
    if kept is not None:
        dp = dp * kept
    delta = (_wide(grad) * _wide(final.out)).sum(-1, keepdim=True)
    ds = (probabilities * (dp - delta) * scale).to(q.dtype)
    return ds @ _expanded(k, q), _folded(ds.transpose(-1, -2) @ q, k), _folded(dv, v)


def merge(total: Partial | None, new: Partial) -> Partial:
    """What two disjoint sets of keys give together; the running output is at least fp32."""
    if total is None:
        return Partial(_wide(new.out), new.lse)
    lse = torch.logaddexp(total.lse, new.lse)
    out = total.out * (total.lse - lse).exp()[..., None] + _wide(new.out) * (new.lse - lse).exp()[..., None]
    return Partial(out, lse)


def _by_flash(q: Tensor, dropout: AttentionDropout | None) -> bool:
    return dropout is None and q.device.type == "cpu" and q.dtype != torch.float64 and flash_cpu.is_available()


def _scores(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> Tensor:
    return _wide(q @ _expanded(k, q).transpose(-1, -2)) * scale + bias


def _kept(probabilities: Tensor, block: Block, dropout: AttentionDropout | None) -> Tensor | None:
    """What survives dropout, scaled up: the mask of (query token, head, key), as `AttentionDropout.apply` has it."""
    if dropout is None:
        return None
    heads = probabilities.shape[1]
    head = torch.arange(dropout.first_head, dropout.first_head + heads, device=probabilities.device)
    rows = dropout.rows[:, None, :] * (dropout.num_heads or heads) + head[:, None]
    keep = keep_mask(dropout.key, rows, block.keys.length, dropout.rate, offset=block.keys.start)
    return keep / (1.0 - dropout.rate)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _expanded(x_BGKE: Tensor, q: Tensor) -> Tensor:
    group = q.shape[1] // x_BGKE.shape[1]
    return x_BGKE.repeat_interleave(group, dim=1) if group > 1 else x_BGKE


def _folded(x_BHKE: Tensor, like_BGKE: Tensor) -> Tensor:
    batch, heads, keys, width = like_BGKE.shape
    return x_BHKE if x_BHKE.shape[1] == heads else x_BHKE.reshape(batch, heads, -1, keys, width).sum(2)
