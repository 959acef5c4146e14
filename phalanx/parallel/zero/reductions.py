"""Reductions over data-parallel ranks: of gradients, and sums over logical parameters (optimizers, gradient norm).

Each reduction of gradients is a chain of collectives, of which the next is started when the one before is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from phalanx.core.layout import AXES, Axis, Shard
from phalanx.optim.base import Reduction, local
from phalanx.parallel.group import Groups, Work


class Lane(Protocol):
    """A queue of work on the device beside the one that computes."""

    def beside(self) -> AbstractContextManager[None]:
        """What is asked of the device inside is done in the lane, after all that it was asked for before."""
        ...

    def mark(self) -> Callable[[], None]:
        """What lets the queue that is current when it is called wait for all that is in the lane now."""
        ...


class CudaLane:
    """A CUDA stream of its own. Only the device waits, by events; the host never does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """See `Lane.beside`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Callable[[], None]:
        """See `Lane.mark`."""
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)


class Reductions:
    """Chains of collectives, gone on with in the order of their start: all ranks start those of a group in one order.

    Args:
        lane: where a chain is given to the device as a whole, at once: NCCL wants the collectives of different groups
            in one order on all ranks too, so it must not depend on when one is done. None: a chain is gone on with
            where that does not wait, so at other moments on other ranks (gloo, whose groups are independent).
    """

    def __init__(self, lane: Lane | None = None) -> None:
        self._lane = lane
        self._chains: deque[_Chain] = deque()

    def start(self, chain: Iterator[Work], release: Callable[[], None] | None = None) -> None:
        """Start a chain; go on with those before it.

        Args:
            release: lets go of memory that the chain's last collective read. Called when that is done, as the stream
                that computes sees it: memory from there must not be used again while the lane reads it.
        """
        self.advance()
        self._chains.append(_Chain(chain, self._lane, release))

    def advance(self) -> None:
        """Go on with what has been started as far as nothing is waited for; to be called often."""
        while self._lane is None and self._chains and self._chains[0].advance():
            self._chains.popleft()

    def finish(self, leave: int = 0) -> None:
        """Wait until no more than `leave` chains are on their way."""
        while len(self._chains) > leave:
            self._chains.popleft().finish()


class _Chain:
    def __init__(self, steps: Iterator[Work], lane: Lane | None, release: Callable[[], None] | None) -> None:
        self._steps, self._release = steps, release
        self._work: Work | None = None
        self._join: Callable[[], None] | None = None
        if lane is None:
            self._work = next(steps, None)
            return
        with lane.beside():
            for work in steps:
                work.wait()
        self._join = lane.mark()

    def advance(self) -> bool:
        """Go on while that does not wait, and say whether the chain is at its end."""
        while self._work is not None:
            if not self._work.is_done():
                return False
            self._next()
        return True

    def finish(self) -> None:
        while self._work is not None:
            self._next()
        if self._join is not None:
            self._join()
            self._let_go()

    def _next(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._let_go()
        self._work = next(self._steps, None)

    def _let_go(self) -> None:
        if self._release is not None:
            self._release()
            self._release = None


_Kind = tuple[tuple[Axis, ...], torch.dtype]


class ShardReduction:
    """The `Reduction` of a sharded layout: one collective for all sums over the same axes.

    Ranks that hold different rows of a parameter call alike, with sums of zero where they hold none.

    Args:
        groups: of this rank.
        shards: what part of its logical parameter each parameter is; a run of rows.
    """

    def __init__(self, groups: Groups, shards: Mapping[Tensor, Shard]) -> None:
        self._groups = groups
        self._axes = {parameter: _spread(groups, shard) for parameter, shard in shards.items()}

    def __call__(self, sums: list[Tensor], parameters: Sequence[Tensor], dim: int | None) -> list[Tensor]:
        """As `phalanx.optim.base.Reduction`; sums over columns are complete, since only rows are split."""
        if dim == -1:
            return sums
        packs: dict[_Kind, list[int]] = {}
        for index, (value, parameter) in enumerate(zip(sums, parameters, strict=True)):
            packs.setdefault((self._axes[parameter], value.dtype), []).append(index)
        complete = list(sums)
        for (axes, _), indices in packs.items():
            if axes:
                for index, value in zip(indices, self._total(axes, [sums[i] for i in indices]), strict=True):
                    complete[index] = value
        return complete

    def _total(self, axes: tuple[Axis, ...], sums: list[Tensor]) -> list[Tensor]:
        packed = torch.cat([value.reshape(-1) for value in sums])
        self._groups.group(*axes).all_reduce(packed).wait()
        pieces = torch.split(packed, [value.numel() for value in sums])
        return [piece.view(value.shape) for piece, value in zip(pieces, sums, strict=True)]


def reduction_over(groups: Groups, shards: Mapping[Tensor, Shard]) -> Reduction:
    """The reduction that the optimizers of parts need; the local one, which may be compiled, where nothing is split."""
    return ShardReduction(groups, shards) if any(_spread(groups, s) for s in shards.values()) else local


class GradientNorm:
    """The norm of the whole gradient, of which every element counts once: that of the rank that owns it.

    All ranks call it, and all get the same bits, so that they clip and judge alike.

    Args:
        groups: of this rank.
        shards: what part of its logical parameter each parameter is, and whether it is owned here.
    """

    def __init__(self, groups: Groups, shards: Mapping[Tensor, Shard]) -> None:
        self._groups = groups
        self._owner = {parameter: shard.owner for parameter, shard in shards.items()}

    @torch.no_grad()
    def __call__(self, parameters: Iterable[Tensor]) -> Tensor:
        """The 2-norm of the gradients of `parameters` of all ranks, float32; squares are added up in float64."""
        held = list(parameters)
        gradients = [p.grad for p in held if p.grad is not None and self._owner[p] and p.grad.numel()]
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
            total = norms.double().square().sum()
        else:
            total = torch.zeros((), dtype=torch.float64, device=held[0].device if held else None)
        if used := tuple(axis for axis in AXES if self._groups.layout.size(axis) > 1):
            self._groups.group(*used).all_reduce(total).wait()
        return total.sqrt().float()


def _spread(groups: Groups, shard: Shard) -> tuple[Axis, ...]:
    """The axes to add over, in the order that names their group."""
    return tuple(axis for axis in AXES if axis in shard.axes and groups.layout.size(axis) > 1)
