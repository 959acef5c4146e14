"""Reductions on their way: each is a chain of collectives, of which the next is started when the one before is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from phalanx.parallel.group import Work


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
