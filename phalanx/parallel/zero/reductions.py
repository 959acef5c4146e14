"""Reductions over data-parallel ranks: of gradients, and sums over logical parameters (optimizers, gradient norm).

Each reduction of gradients is a chain of collectives, of which the next is started when the one before is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.core.layout import AXES, Axis, Shard
from phalanx.optim.skipping import Reduction, local
from phalanx.parallel.group import Groups, Work


class CudaLane:
    """A CUDA stream beside the one that computes. Only the device waits, by events; the host never does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is asked of the device inside is done in the lane, after all that it was asked for before."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Callable[[], None]:
        """A function that makes the then current queue wait for all that is in the lane now."""
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)


class Reductions:
    """Chains of collectives, gone on with in the order of their start: all ranks start those of a group in one order.

    Without a lane a chain is gone on with where that does not wait, so at other moments on other ranks (gloo, whose
    groups are independent).
    """

    def __init__(self, lane: CudaLane | None = None) -> None:
        self._lane = lane
        self._chains: deque[_Chain] = deque()

    def start(self, chain: Iterator[Work], release: Callable[[], None] | None = None) -> None:
        """Start a chain; go on with those before it.

        `release` lets go of memory that the chain's last collective read. It is called when that is done, as the stream
        that computes sees it: memory from there must not be used again while the lane reads it.
        """
        # In the order of their start, and on all ranks alike: collectives of one group are matched by their order.
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
    def __init__(self, steps: Iterator[Work], lane: CudaLane | None, release: Callable[[], None] | None) -> None:
        self._steps, self._release = steps, release
        self._work: Work | None = None
        self._join: Callable[[], None] | None = None
        if lane is None:
            self._work = next(steps, None)
            return
        # NCCL wants the collectives of different groups in one order on all ranks, too: it must not depend on when one
        # is done. So a chain is given to the device as a whole, at once.
        with lane.beside():
            for work in steps:
                work.wait()
        self._join = lane.mark()

    def advance(self) -> bool:
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


class ShardReduction:
    """The `Reduction` of a sharded layout: one collective for all sums over the same axes.

    Ranks that hold different rows of a parameter call alike, with sums of zero where they hold none. `shards` are what
    part of its logical parameter each parameter is; a run of rows.
    """

    def __init__(self, groups: Groups, shards: Mapping[Tensor, Shard]) -> None:
        self._groups = groups
        self._axes = {parameter: _spread(groups, shard) for parameter, shard in shards.items()}

    def __call__(self, sums: list[Tensor], parameters: Sequence[Tensor], dim: int | None) -> list[Tensor]:
        """As `phalanx.optim.skipping.Reduction`."""
        if dim == -1:  # sums over columns are complete, since only rows are split
            return sums
        # A collective takes its latency however few numbers it carries, so those over the same axes go together.
        packs: dict[tuple[tuple[Axis, ...], torch.dtype], list[int]] = {}
        for index, (value, parameter) in enumerate(zip(sums, parameters, strict=True)):
            packs.setdefault((self._axes[parameter], value.dtype), []).append(index)
        complete = list(sums)
        for (axes, _), indices in packs.items():
            if not axes:
                continue
            packed = torch.cat([sums[index].reshape(-1) for index in indices])
            self._groups.group(*axes).all_reduce(packed).wait()
            pieces = torch.split(packed, [sums[index].numel() for index in indices])
            for index, piece in zip(indices, pieces, strict=True):
                complete[index] = piece.view(sums[index].shape)
        return complete


def reduction_over(groups: Groups, shards: Mapping[Tensor, Shard]) -> Reduction:
    """The reduction that the optimizers of parts need; the local one, which may be compiled, where nothing is split."""
    return ShardReduction(groups, shards) if any(_spread(groups, s) for s in shards.values()) else local


class GradientNorm:
    """The norm of the whole gradient, of which every element counts once: that of the rank that owns it.

    All ranks call it, and all get the same bits, so that they clip and judge alike.
    """

    def __init__(self, groups: Groups, shards: Mapping[Tensor, Shard]) -> None:
        self._groups = groups
        self._owner = {parameter: shard.owner for parameter, shard in shards.items()}

    @torch.no_grad()
    def __call__(self, parameters: Iterable[Tensor]) -> Tensor:
        """The 2-norm of the gradients of `parameters` of all ranks, float32; squares are added up in float64."""
        # What several ranks hold alike is counted by its owner alone.
        held = list(parameters)
        gradients = [p.grad for p in held if p.grad is not None and self._owner[p] and p.grad.numel()]
        if gradients:
            # One kernel for all tensors; the few norms are then squared and added in float64, in which their order
            # hardly matters.
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
            total = norms.double().square().sum()
        else:
            total = torch.zeros((), dtype=torch.float64, device=held[0].device if held else None)
        self.add(total)
        return total.sqrt().float()

    def add(self, values: Tensor) -> None:
        """Sum over all ranks, in place."""
        if used := tuple(axis for axis in AXES if self._groups.layout.size(axis) > 1):
            self._groups.group(*used).all_reduce(values).wait()


def _spread(groups: Groups, shard: Shard) -> tuple[Axis, ...]:
    return tuple(axis for axis in AXES if axis in shard.axes and groups.layout.size(axis) > 1)
