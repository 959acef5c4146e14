"""How much strangers may ask of the driver: pure but for the clock that is passed in.

Every connection that says something and fails to prove itself takes one from the budget of its address, which fills
again with time. While it is empty, only those from there are heard whose first words show that they know the token
(`proof.make_pass`). So one machine that tries again and again costs little, and executors come in as ever, those of the
same machine too.
"""

from __future__ import annotations

from collections.abc import Callable

FAILURES = 100
FAILURES_PER_S = 10.0
_MAX_ADDRESSES = 4096

Clock = Callable[[], float]


class Door:
    """The budgets of all addresses."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}

    def admits(self, address: str) -> bool:
        """Whether anybody from there may try."""
        return address not in self._spent or self._left(address) >= 1.0

    def failed(self, address: str) -> None:
        """A connection from there has not proved itself."""
        left = self._left(address)
        self._spent.pop(address, None)  # the latest to fail are last, the first are forgotten first
        self._spent[address] = max(0.0, left - 1.0), self._clock()
        if len(self._spent) > _MAX_ADDRESSES:
            self._spent.pop(next(iter(self._spent)))

    def _left(self, address: str) -> float:
        left, at_s = self._spent.get(address, (float(FAILURES), self._clock()))
        return min(float(FAILURES), left + (self._clock() - at_s) * FAILURES_PER_S)
