"""Attention of some queries to some keys in pieces, and which positions of a sequence each context rank holds.

A causal sequence cut into runs gives the last rank most of the work. So where layers see all of the past, a sequence is
cut into 2 C pieces and rank r of C holds pieces r and 2 C - 1 - r: every rank then sees equally many keys ("zig-zag").
Where all layers have windows, the work is equal anyway, and runs have fewer neighbours.

*Blocks* of attention are put together by their log-sum-exp. With S = scale Q K^T, a softmax over all keys is made of
softmaxes over pieces of them: each gives its output and the log-sum-exp of its scores, and pieces add up with weights
exp(lse - total). In the backward pass every piece needs only the final output and log-sum-exp (FlashAttention, arXiv
2205.14135, section 3.1; ring attention, arXiv 2310.01889).

On CUDA a block is computed by the fused kernel that the run's trial found right where all of it is seen, or what
causality leaves of it, and by FlexAttention where windows and documents decide: no score is kept, nor a dense mask.

Shapes: B batch, H query heads, G key/value heads (dividing H), S queries, K keys, E head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.kernels import attention_aten
from phalanx.kernels.attention import SMALLEST_FLEX_HEAD, AttentionDropout, Kernel, flex_partial
from phalanx.kernels.counter import keep_mask
from phalanx.kernels.masks import block_mask, seen_keys


@dataclass(frozen=True)
class Piece:
    """Positions ``[start, stop)`` of a sequence."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Positions."""
        return self.stop - self.start

    def sees(self, keys: Piece, window: int | None) -> bool:
        """Whether any query of this piece may see any of `keys`: not later, and not before its window."""
        if keys.start >= self.stop:
            return False
        return window is None or keys.stop - 1 > self.start - window

    def sees_all(self, keys: Piece, window: int | None) -> bool:
        """Whether every query of this piece sees every one of `keys` (documents aside)."""
        return keys.stop <= self.start + 1 and (window is None or self.stop - 1 - keys.start < window)


@dataclass(frozen=True)
class SequenceSplit:
    """How a sequence of `length` positions is shared by the `size` ranks of a context group; balanced: zig-zag.

    Raises:
        UserError: the sequence cannot be cut into equal pieces.
    """

    length: int
    size: int
    balanced: bool

    def __post_init__(self) -> None:
        count = self.size * self.pieces_per_rank
        if self.length % count:
            raise UserError(
                f"a sequence of {self.length} tokens cannot be cut into {count} equal pieces",
                cure=f"make data.sequence_length a multiple of {count}",
                field="parallel.context",
                value=self.size,
            )

    @property
    def pieces_per_rank(self) -> int:
        """2 where balanced, else 1."""
        return 2 if self.balanced and self.size > 1 else 1

    @property
    def local_length(self) -> int:
        """Positions on each rank."""
        return self.length // self.size

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` holds, in the order in which it holds it."""
        count = self.size * self.pieces_per_rank
        size = self.length // count
        numbers = (rank, count - 1 - rank) if self.pieces_per_rank == 2 else (rank,)
        return tuple(Piece(n * size, (n + 1) * size) for n in numbers)

    def needed(self, reader: int, owner: int, window: int | None) -> tuple[int, ...]:
        """Which pieces of `owner` (by their place in `pieces`) some query of `reader` sees."""
        return tuple(
            place
            for place, keys in enumerate(self.pieces(owner))
            if any(queries.sees(keys, window) for queries in self.pieces(reader))
        )


# Finite, so that a query that sees none of a piece's keys gets weight exp(-1e30 - lse) = 0 instead of NaN.
_UNSEEN = -1e30

Way = Literal["cudnn", "flash", "flex", "cpu", "products"]
"""How a block is computed; ``cpu`` is torch's flash kernel for CPUs, ``products`` matrix products that keep scores."""


class Block:
    """Queries and keys of one piece of attention, by position; layers of one kind share it in a forward pass.

    Args:
        window: keys that a query sees; None: all of the past.
        documents_BS: of the whole sequence; attention stays inside a document. None: one document.
    """

    def __init__(self, queries: Piece, keys: Piece, window: int | None, documents_BS: Tensor | None) -> None:
        self.queries, self.keys, self.window, self.documents_BS = queries, keys, window, documents_BS
        self._bias: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._flex_mask: dict[torch.device, Any] = {}

    @property
    def is_whole(self) -> bool:
        """Whether every query sees every key."""
        return self.documents_BS is None and self.queries.sees_all(self.keys, self.window)

    @property
    def is_causal(self) -> bool:
        """Whether query i sees the keys up to i, and nothing else restricts it."""
        unrestricted = self.documents_BS is None and (self.window is None or self.window >= self.keys.length)
        return unrestricted and self.queries == self.keys

    def flex_mask(self, device: torch.device) -> Any:
        """FlexAttention's mask of this block."""
        if device not in self._flex_mask:
            queries, keys = (range(piece.start, piece.stop) for piece in (self.queries, self.keys))
            self._flex_mask[device] = block_mask(queries, keys, self.window, self.documents_BS, device)
        return self._flex_mask[device]

    def bias(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What is added to the scores, (B or 1, 1, S, K): 0 where seen, a very negative number elsewhere."""
        if (dtype, device) in self._bias:
            return self._bias[dtype, device]
        if self.is_whole:
            zero = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
            return zero.expand(1, 1, self.queries.length, self.keys.length)
        queries, keys = (slice(piece.start, piece.stop) for piece in (self.queries, self.keys))
        seen = seen_keys(queries, keys, self.window, self.documents_BS, device)
        bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, _UNSEEN)
        self._bias[dtype, device] = bias
        return bias


class Partial(NamedTuple):
    """Output (B, H, S, E) and fp32 log-sum-exp (B, H, S) over the keys seen so far."""

    out: Tensor
    lse: Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: Block,
    scale: float,
    dropout: AttentionDropout | None = None,
    kernel: Kernel | None = None,
) -> Partial:
    """Attention of a block's queries to its keys alone; `kernel`: that a trial found right on CUDA."""
    way = way_of(q, block, dropout, kernel)
    if way == "cudnn" or way == "flash":
        return Partial(*attention_aten.cuda_forward(way, q, k, v, is_causal=not block.is_whole, scale=scale))
    if way == "flex":
        _, out, lse = flex_partial(q, k, v, block.flex_mask(q.device), scale)
        return Partial(out.detach(), lse.detach().clamp(min=_UNSEEN))
    bias = block.bias(q.dtype, q.device)
    if way == "cpu":
        return Partial(*attention_aten.cpu_forward(q, k, v, bias, scale))
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
    kernel: Kernel | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through this block, given the output and log-sum-exp over *all* keys."""
    way = way_of(q, block, dropout, kernel)
    if way == "cudnn" or way == "flash":
        whole = block.is_whole
        return attention_aten.cuda_backward(way, grad, q, k, v, final.out, final.lse, is_causal=not whole, scale=scale)
    if way == "flex":
        return _flex_backward(grad, q, k, v, final, block, scale)
    bias = block.bias(q.dtype, q.device)
    if way == "cpu":
        return attention_aten.cpu_backward(grad, q, k, v, final.out, final.lse, bias, scale)
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


def _flex_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, final: Partial, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The block again, and back through how it was put together with the others.

    FlexAttention's backward knows its own log-sum-exp alone; what that adds to the final one has a gradient, too.
    """
    leaves, out, lse = flex_partial(q, k, v, block.flex_mask(q.device), scale)
    share = (lse.detach() - final.lse).exp()
    lse_grad = share * (_wide(grad) * (_wide(out.detach()) - _wide(final.out))).sum(-1)
    out_grad = (_wide(grad) * share[..., None]).to(out.dtype)
    with torch.enable_grad():
        dq, dk, dv = torch.autograd.grad((out, lse), leaves, (out_grad, lse_grad))
    return dq, dk, dv


def way_of(q: Tensor, block: Block, dropout: AttentionDropout | None, kernel: Kernel | None) -> Way:
    """How a block is computed; a `kernel` that a trial found right does what it can."""
    if dropout is not None:
        return "products"
    if kernel is None and q.device.type == "cpu":
        return "cpu" if q.dtype != torch.float64 and attention_aten.is_available() else "products"
    is_half, size = q.dtype in (torch.bfloat16, torch.float16), q.shape[-1]
    kernel = kernel or ("flash" if is_half and size % 8 == 0 else "flex")
    if (kernel == "cudnn" or kernel == "flash") and (block.is_whole or block.is_causal):
        return kernel
    return "flex" if kernel in ("cudnn", "flash", "flex") and size >= SMALLEST_FLEX_HEAD else "products"


def tried(
    kernel: Kernel, length: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """A ring's attention by `kernel`, for its trial: queries of one piece on that before it, and on their own."""
    first, second = Piece(0, length), Piece(length, 2 * length)
    blocks = [Block(second, keys, None, None) for keys in (first, second)]

    def through(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scale, kv = q.shape[-1] ** -0.5, torch.stack([k, v])
        pieces = torch.split(kv, length, dim=3)
        total = None
        for block, (keys, values) in zip(blocks, pieces, strict=True):
            total = merge(total, attend(q, keys, values, block, scale, kernel=kernel))
        assert total is not None
        final = Partial(total.out.to(q.dtype), total.lse)
        parts = [
            attend_backward(grad, q, keys, values, final, block, scale, kernel=kernel)
            for block, (keys, values) in zip(blocks, pieces, strict=True)
        ]
        dq, dk, dv = zip(*parts, strict=True)
        return final.out, _wide(dq[0]) + dq[1], torch.cat(dk, dim=2), torch.cat(dv, dim=2)

    return through


def merge(total: Partial | None, new: Partial) -> Partial:
    """What two disjoint sets of keys give together; the running output is at least fp32."""
    if total is None:
        return Partial(_wide(new.out), new.lse)
    lse = torch.logaddexp(total.lse, new.lse)
    out = total.out * (total.lse - lse).exp()[..., None] + _wide(new.out) * (new.lse - lse).exp()[..., None]
    return Partial(out, lse)


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
