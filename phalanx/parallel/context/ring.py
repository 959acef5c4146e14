"""Ring attention (context parallel): keys and values go round the group; each rank attends to those that have arrived.

In step s of C, rank r attends to the keys of rank r - s, while those of rank r - s - 1 are on their way. Keys go
straight from their owner to the rank whose turn it is, and only those pieces that one of its queries sees: with
windows, only neighbours talk. The backward pass goes round again, so that a rank keeps only its own keys, and sends the
gradients of others' keys home (arXiv 2310.01889).

Shapes: B batch, H query heads, G key/value heads, S local positions, E head size, P positions of some pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.attention import AttentionDropout, Kernel
from phalanx.parallel.context.blocks import Block, Partial, SequenceSplit, attend, attend_backward, merge
from phalanx.parallel.group import Group, Work

_KEYS, _GRADIENTS = 0, 1  # tags


@dataclass(frozen=True)
class Layer:
    """What attention of one layer needs beside its tensors; `kernel`: that a trial found right on CUDA."""

    window: int | None
    scale: float
    dropout: AttentionDropout | None
    kernel: Kernel | None = None


class _Arrival(NamedTuple):
    owner: int
    places: tuple[int, ...]
    kv: Tensor  # keys and values (2, B, G, P, E) of these pieces


class Ring:
    """The exchange of one forward pass and its backward over a context group, over the same blocks for all layers.

    `documents_BS` are those of the whole sequence, or None.
    """

    def __init__(self, group: Group, split: SequenceSplit, documents_BS: Tensor | None) -> None:
        self.group, self.split, self._documents = group, split, documents_BS
        self._blocks: dict[tuple[int, int, int, int | None], Block] = {}
        self.piece = split.local_length // split.pieces_per_rank

    def attention(self, q_BHSE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, layer: Layer) -> Tensor:
        """(B, H, S, E): this rank's queries over the whole sequence."""
        out: Tensor = _RingAttention.apply(q_BHSE, k_BGSE, v_BGSE, self, layer)  # type: ignore[no-untyped-call]
        return out

    def block(self, mine: int, owner: int, theirs: int, window: int | None) -> Block | None:
        """Queries of this rank's piece `mine` on piece `theirs` of `owner`; None where nothing is seen."""
        queries = self.split.pieces(self.group.index)[mine]
        keys = self.split.pieces(owner)[theirs]
        if not queries.sees(keys, window):
            return None
        key = (mine, owner, theirs, window)
        if key not in self._blocks:
            self._blocks[key] = Block(queries, keys, window, self._documents)
        return self._blocks[key]

    def queries(self, mine: int) -> slice:
        """Where piece `mine` lies among the local positions."""
        return slice(mine * self.piece, (mine + 1) * self.piece)

    def arrivals(self, kv: Tensor, window: int | None) -> Iterator[_Arrival]:
        """What this rank needs of every rank, own `kv` (2, B, G, S, E) first, each while the next is on its way."""
        size, here = self.group.size, self.group.index
        coming = self._start(kv, 1, window) if size > 1 else None
        yield _Arrival(here, tuple(range(self.split.pieces_per_rank)), kv)
        for step in range(1, size):
            assert coming is not None
            present, coming = coming, self._start(kv, step + 1, window) if step + 1 < size else None
            work, arrival, _sent = present
            work.wait()
            yield arrival

    def send_home(self, step: int, part: Tensor, window: int | None) -> tuple[Work, Tensor, tuple[int, ...], Tensor]:
        """Send gradients (2, B, G, P, E) of what arrived in `step` to its owner, and receive those of this rank's keys.

        Returns:
            The work; what it receives, and of which pieces; and `part`, to be kept until it is done.
        """
        size, here = self.group.size, self.group.index
        reader, owner = (here + step) % size, (here - step) % size
        places = self.split.needed(reader, here, window)
        buffer = part.new_empty((*part.shape[:3], len(places) * self.piece, part.shape[4]))
        work = self.group.exchange(_some(part), owner, _some(buffer), reader, _GRADIENTS)
        return work, buffer, places, part

    def add_pieces(self, total: Tensor, part: Tensor, places: tuple[int, ...]) -> None:
        """Add (2, B, G, P, E) of some pieces to (2, B, G, S, E) of all."""
        for number, place in enumerate(places):
            total[:, :, :, self.queries(place)] += part[:, :, :, self.queries(number)]

    def _start(self, kv: Tensor, step: int, window: int | None) -> tuple[Work, _Arrival, Tensor]:
        """Send what rank ``here + step`` needs, the last that is returned, while what is needed of ``here - step``
        arrives."""
        size, here = self.group.size, self.group.index
        reader, owner = (here + step) % size, (here - step) % size
        parcel = self._pieces(kv, self.split.needed(reader, here, window))
        places = self.split.needed(here, owner, window)
        buffer = kv.new_empty((*kv.shape[:3], len(places) * self.piece, kv.shape[4]))
        work = self.group.exchange(_some(parcel), reader, _some(buffer), owner, _KEYS)
        return work, _Arrival(owner, places, buffer), parcel

    def _pieces(self, kv: Tensor, places: tuple[int, ...]) -> Tensor:
        if not places:
            return kv[:, :, :, :0]
        return torch.cat([kv[:, :, :, self.queries(place)] for place in places], dim=3).contiguous()


def _some(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, layer: Layer) -> Tensor:
        kv = torch.stack([k, v])
        totals: list[Partial | None] = [None] * ring.split.pieces_per_rank
        for arrival in ring.arrivals(kv, layer.window):
            for mine in range(len(totals)):
                for number, theirs in enumerate(arrival.places):
                    block = ring.block(mine, arrival.owner, theirs, layer.window)
                    if block is None:
                        continue
                    here, there = ring.queries(mine), ring.queries(number)
                    keys, values = arrival.kv[:, :, :, there]
                    rows = _rows(layer.dropout, here)
                    new = attend(q[:, :, here], keys, values, block, layer.scale, rows, layer.kernel)
                    totals[mine] = merge(totals[mine], new)
        found = [total for total in totals if total is not None]  # every query sees itself, so none is missing
        out = torch.cat([total.out for total in found], dim=2).to(q.dtype)
        ctx.save_for_backward(q, kv, out, torch.cat([total.lse for total in found], dim=2))
        ctx.ring, ctx.layer = ring, layer
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        ring, layer = ctx.ring, ctx.layer
        dq = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        dkv = torch.zeros(kv.shape, dtype=dq.dtype, device=q.device)
        going = []
        grad = grad.contiguous()
        for step, arrival in enumerate(ring.arrivals(kv, layer.window)):
            part = _gradients(ring, layer, arrival, grad, q, out, lse, dq)
            if step == 0:
                dkv += part
            else:
                going.append(ring.send_home(step, part, layer.window))
        for work, pieces, places, _sent in going:
            work.wait()
            ring.add_pieces(dkv, pieces, places)
        dk, dv = dkv.to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _gradients(
    ring: Ring, layer: Layer, arrival: _Arrival, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, dq: Tensor
) -> Tensor:
    """Gradients (2, B, G, P, E) of what has arrived; those of the queries are added to `dq`."""
    part = torch.zeros(arrival.kv.shape, dtype=dq.dtype, device=dq.device)
    for mine in range(ring.split.pieces_per_rank):
        here = ring.queries(mine)
        final = Partial(out[:, :, here], lse[:, :, here])
        for number, theirs in enumerate(arrival.places):
            block = ring.block(mine, arrival.owner, theirs, layer.window)
            if block is None:
                continue
            there = ring.queries(number)
            keys, values = arrival.kv[:, :, :, there]
            rows = _rows(layer.dropout, here)
            parts = attend_backward(
                grad[:, :, here], q[:, :, here], keys, values, final, block, layer.scale, rows, layer.kernel
            )
            for total, own in zip((dq[:, :, here], part[0, :, :, there], part[1, :, :, there]), parts, strict=True):
                total += own
    return part


def _rows(dropout: AttentionDropout | None, queries: slice) -> AttentionDropout | None:
    return None if dropout is None else replace(dropout, rows=dropout.rows[:, queries])
