"""Reductions on their way: each is a chain of collectives, of which the next is started when the one before is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from phalanx.parallel.group import Work


class Reductions:
    """Chains of collectives, advanced in the order in which they were started, so that all ranks start the collectives
    of every group in the same order.

    Args:
        polls: go on with a chain only where that does not wait (gloo, whose groups are independent of one another).
            Otherwise chains go on at fixed moments, when another one is started: NCCL wants the collectives of
            different groups in one order on all ranks too.
    """

    def __init__(self, polls: bool) -> None:
        self._polls = polls
        self._chains: deque[_Chain] = deque()

    def start(self, chain: Iterator[Work]) -> None:
        """Start the first collective of a chain; go on with those before it."""
        self.advance()
        self._chains.append(_Chain(chain))

    def advance(self) -> None:
        """Go on with what has been started, as far as this does not wait long."""
        while self._chains and self._chains[0].advance(self._polls):
            self._chains.popleft()

    def finish(self, leave: int = 0) -> None:
        """Wait until no more than `leave` chains are on their way."""
        while len(self._chains) > leave:
            self._chains.popleft().finish()


class _Chain:
    def __init__(self, steps: Iterator[Work]) -> None:
        self._steps = steps
        self._work = next(steps, None)

    def advance(self, polls: bool) -> bool:
        """Go on, and say whether the chain is at its end."""
        while self._work is not None:
            if polls and not self._work.is_done():
                return False
            self._next()
        return True

    def finish(self) -> None:
        while self._work is not None:
            self._next()

    def _next(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = next(self._steps, None)
