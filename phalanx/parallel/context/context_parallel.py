"""A rank's part of every sequence, and the attention that makes up for the rest: all-to-all over heads, or a ring.

*All-to-all over heads* (DeepSpeed-Ulysses, arXiv 2309.14509): part of every sequence in exchange for all of some heads.

Before attention, rank r gets the heads ``[r H / C, (r + 1) H / C)`` of the whole sequence; afterwards the outputs
travel back. Attention itself is the ordinary one, with every mask and back end. The ranks must divide the heads.

Shapes: B batch, H heads here, S local positions, L positions of the whole sequence, E head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.kernels.attention import AttentionDropout, CausalKernel, attention
from phalanx.kernels.attention_trial import Shape, Trial
from phalanx.kernels.masks import AttentionMask
from phalanx.model.config import ModelConfig
from phalanx.model.forward_context import Attending, DropoutState
from phalanx.parallel.config import ContextMethod
from phalanx.parallel.context.blocks import SequenceSplit, tried
from phalanx.parallel.context.ring import Layer, Ring
from phalanx.parallel.group import Group


def to_heads(x_BHSE: Tensor, group: Group, order_L: Tensor) -> Tensor:
    """(B, H, S, E) of all heads here -> (B, H / C, L, E) of some heads, positions in their natural order.

    `order_L` is the place of each position among those of all ranks one after the other.

    Raises:
        UserError: the ranks do not divide the heads.
    """
    if x_BHSE.shape[1] % group.size:
        raise UserError(
            f"all_to_all cannot share {x_BHSE.shape[1]} heads (on each tensor rank) among {group.size} ranks",
            cure="set parallel.context_method=ring, or a divisor of the key/value heads",
            field="parallel.context",
            value=group.size,
        )
    out: Tensor = _Exchange.apply(x_BHSE, group, order_L, True)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """Either direction; each is the other's transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, order: Tensor, gather: bool) -> Tensor:
        ctx.group, ctx.order, ctx.gather = group, order, gather
        return _gather(x, group, order) if gather else _scatter(x, group, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = _scatter if ctx.gather else _gather
        return back(grad, ctx.group, ctx.order), None, None, None


def _gather(x_BHSE: Tensor, group: Group, order: Tensor) -> Tensor:
    size = group.size
    batch, heads, positions, width = x_BHSE.shape
    parcels = x_BHSE.reshape(batch, size, heads // size, positions, width).movedim(1, 0).contiguous()  # j is for rank j
    got = torch.empty_like(parcels)
    group.all_to_all(got, parcels).wait()
    return got.movedim(0, 2).flatten(2, 3).index_select(2, order)


def _scatter(x_BHLE: Tensor, group: Group, order: Tensor) -> Tensor:
    placed = torch.empty_like(x_BHLE)
    placed[:, :, order] = x_BHLE
    batch, heads, positions, width = placed.shape
    shape = (batch, heads, group.size, positions // group.size, width)
    parcels = placed.view(shape).movedim(2, 0).contiguous()
    got = torch.empty_like(parcels)
    group.all_to_all(got, parcels).wait()
    return got.movedim(0, 1).flatten(1, 2)


Attend = Callable[[Tensor, Tensor, Tensor, Attending], Tensor]


class ContextSpread:
    """How one rank of a context group takes part; in a group of one, everything stays as it is."""

    def __init__(self, config: ModelConfig, group: Group, method: ContextMethod, length: int) -> None:
        all_windows = all(config.window_of(layer) is not None for layer in range(config.layers))
        balanced = method == "ring" and not all_windows
        self.group, self._method, self._rows = group, method, config.max_sequence
        self.kernel: CausalKernel | None = None  # of plain causal attention on CUDA, where one was found to be right
        self.split = SequenceSplit(length, group.size, balanced)
        places = [
            torch.cat([torch.arange(piece.start, piece.stop) for piece in self.split.pieces(rank)])
            for rank in range(group.size)
        ]
        self.positions_S = places[group.index]
        self._order_L = torch.argsort(torch.cat(places))
        self._copies: dict[tuple[int, torch.device], Tensor] = {}

    def cut(self, x_BL: Tensor) -> Tensor:
        """This rank's positions of (B, L, …)."""
        if self.group.size == 1:
            return x_BL
        return x_BL.index_select(1, self.positions_on(x_BL.device))

    def positions_on(self, device: torch.device) -> Tensor:
        """Where this rank's positions (S,) stand in their sequences."""
        return self._on(self.positions_S, device)

    def dropout_rows(self, state: DropoutState) -> Tensor:
        """Hash rows (B, S) of this rank's tokens, the same numbers as in a whole sequence."""
        positions = self.positions_on(state.sample_index_B.device)
        return state.sample_index_B.to(torch.int64)[:, None] * self._rows + positions

    def attention_trial(self, whole: Shape) -> Trial:
        """What is to be tried, where a layer with all heads of this rank asks for `whole` on a whole sequence."""
        size = self.group.size
        if size == 1:
            return Trial(whole)
        if self._method == "ring":
            piece = self.split.local_length // self.split.pieces_per_rank
            shape = replace(whole, length=piece, past=piece)
            return Trial(shape, lambda kernel: tried(kernel, piece), ("cudnn", "flash", "flex", "math"))
        heads, kv_heads = whole.heads // size, whole.kv_heads // size
        return Trial(replace(whole, heads=heads, kv_heads=kv_heads, layout="heads"))

    def attend_with(self, documents_BL: Tensor | None, dropout: DropoutState | None) -> Attend | None:
        """Attention for one forward pass, inside documents of whole sequences; None: the ordinary one will do."""
        if self.group.size == 1:
            return None
        if self._method == "ring":
            return self._ring(documents_BL, dropout)
        return self._all_to_all(documents_BL, dropout)

    def _ring(self, documents_BL: Tensor | None, state: DropoutState | None) -> Attend:
        ring = Ring(self.group, self.split, documents_BL)
        kernel = None if self.kernel is None else self.kernel.name
        rows_BS = None if state is None else self.dropout_rows(state)

        def attend(q: Tensor, k: Tensor, v: Tensor, how: Attending) -> Tensor:
            dropped = _dropout(how, state, rows_BS, how.first_head, how.num_heads or q.shape[1])
            return ring.attention(q, k, v, Layer(how.window, q.shape[-1] ** -0.5, dropped, kernel))

        return attend

    def _all_to_all(self, documents_BL: Tensor | None, state: DropoutState | None) -> Attend:
        length, group = self.split.length, self.group
        masks: dict[int | None, AttentionMask] = {}
        rows_BL = None
        if state is not None:
            rows_BL = state.sample_index_B.to(torch.int64)[:, None] * self._rows + torch.arange(
                length, device=state.sample_index_B.device
            )

        def attend(q: Tensor, k: Tensor, v: Tensor, how: Attending) -> Tensor:
            if how.window not in masks:
                masks[how.window] = AttentionMask(length, length, window=how.window, documents_BS=documents_BL)
            order = self._on(self._order_L, q.device)
            mine = [to_heads(x, group, order) for x in (q, k, v)]
            first = how.first_head + group.index * (q.shape[1] // group.size)
            dropped = _dropout(how, state, rows_BL, first, how.num_heads or q.shape[1])
            mask, kernel = masks[how.window], self.kernel
            out = attention(*mine, window=how.window, mask=mask, dropout=dropped, backend=how.backend, kernel=kernel)
            back: Tensor = _Exchange.apply(out, group, order, False)  # type: ignore[no-untyped-call]
            return back

        return attend

    def _on(self, x: Tensor, device: torch.device) -> Tensor:
        """One of this value's tensors on a device: copied there once, since a copy from the host waits for it."""
        key = id(x), device
        if key not in self._copies:
            self._copies[key] = x.to(device)
        return self._copies[key]


def _dropout(
    how: Attending, state: DropoutState | None, rows: Tensor | None, first: int, heads: int
) -> AttentionDropout | None:
    if state is None or rows is None or not how.dropout:
        return None
    return AttentionDropout(how.dropout, state.key(how.site), rows, first, heads)
