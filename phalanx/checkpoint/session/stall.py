"""How long training stands still, and for which snapshot. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.checkpoint.session.ledger import Event


class Stall:
    """Charges time to the snapshot under way, or to the next one.

    Args:
        is_copying: whether the last snapshot is still being copied, so that waiting is for that.
    """

    def __init__(self, is_copying: Callable[[], bool]) -> None:
        self._is_copying = is_copying
        self._event: Event | None = None
        self._blocked_s = 0.0

    def begin(self, event: Event) -> None:
        """A snapshot is taken: what training waited for since the one before was for this one."""
        event.stall_s, self._blocked_s = self._blocked_s, 0.0
        self._event = event

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time in here is time in which training stands still."""
        began_s = time.perf_counter()
        before = self._event
        try:
            yield
        finally:
            seconds = time.perf_counter() - began_s
            if self._event is not None and (self._event is not before or self._is_copying()):
                self._event.stall_s += seconds  # it was taken in here, or is not copied yet
            else:
                self._blocked_s += seconds
