"""How long a rank waits for others, so that its own time can be told from the step that all share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Waits:
    """Nanoseconds that one thread, that which makes this, has waited in collectives of the groups that count here.

    Waiting in other threads goes on beside that one's work. On a GPU a collective is waited for by later work of the
    device, not by a thread: nothing is counted then.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.waited_ns = 0
        self._clock_ns = clock_ns
        self._thread = threading.get_ident()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the block, also when it raises."""
        begin_ns = self._clock_ns()
        try:
            yield
        finally:
            if threading.get_ident() == self._thread:
                self.waited_ns += self._clock_ns() - begin_ns
