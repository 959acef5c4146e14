"""Reductions on their way: each is a chain of collectives, of which the next is started when the one before is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from phalanx.parallel.group import Work


class Reductions:
    """Chains of collectives, gone on with in the order of their start: all ranks start those of a group in one order.

    Args:
        polls: go on with a chain only where that does not wait, so at other moments on other ranks (gloo, whose groups
            are independent of one another). Otherwise, whenever another chain is started, the ones before it are gone
            on with to their end: NCCL wants the collectives of different groups in one order on all ranks too, and
            waiting holds up the stream, not the host.
    """

    def __init__(self, polls: bool) -> None:
        self._polls = polls
        self._chains: deque[_Chain] = deque()

    def start(self, chain: Iterator[Work], *, goes_on: bool = False) -> None:
        """Start the first collective of a chain; go on with those before it.

        Args:
            goes_on: whether more than one collective is to come.
        """
        if self._polls:
            self.advance()
        else:
            self._go_on()
        self._chains.append(_Chain(chain, goes_on))

    def advance(self) -> None:
        """Go on with what has been started as far as nothing is waited for; to be called often."""
        while self._polls and self._chains and self._chains[0].advance():
            self._chains.popleft()

    def finish(self, leave: int = 0) -> None:
        """Wait until no more than `leave` chains are on their way."""
        while len(self._chains) > leave:
            self._chains.popleft().finish()

    def _go_on(self) -> None:
        for chain in self._chains:
            if chain.goes_on:
                chain.finish()


class _Chain:
    def __init__(self, steps: Iterator[Work], goes_on: bool) -> None:
        self.goes_on = goes_on
        self._steps = steps
        self._work = next(steps, None)

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

    def _next(self) -> None:
        assert self._work is not None
        self._work.wait()
        self._work = next(self._steps, None)
