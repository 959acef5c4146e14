"""How much strangers may ask of the driver: pure but for the clock that is passed in.

Every connection that fails to prove itself takes one from the budget of its address, which fills again with time. While
it is empty, connections from there are closed before anything is read. So one machine that tries again and again costs
little, and executors on other machines come in as ever.
"""

from __future__ import annotations

from collections.abc import Callable

FAILURES = 100
FAILURES_PER_S = 10.0
_MAX_ADDRESSES = 4096
_LOG_EACH_S = 10.0
_MAX_KINDS = 256

Clock = Callable[[], float]


class Door:
    """The budgets of all addresses."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spent: dict[str, tuple[float, float]] = {}

    def admits(self, address: str) -> bool:
        """Whether a connection from there may try."""
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


class Sparing:
    """Lets one line of each kind through in ten seconds, and counts the others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}

    def due(self, kind: str) -> int | None:
        """How many of this kind were kept back since the last line; None: keep this one back too."""
        now_s = self._clock()
        since_s, kept_back = self._kinds.get(kind, (float("-inf"), 0))
        if now_s - since_s < _LOG_EACH_S:
            self._kinds[kind] = since_s, kept_back + 1
            return None
        self._kinds[kind] = now_s, 0
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        return kept_back
