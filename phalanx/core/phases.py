"""How long each phase of starting up takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Phases:
    """Seconds by phase, in the order in which phases began first; a phase that is entered again adds up.

    Phases may be nested. The time of an inner one that is named after the outer one (``mesh``, ``mesh/tensor``) is
    part of that too, and `total_s` counts the outer one alone; that of any other is taken from the outer one's.

    Attributes:
        intervals: name, begin and end by the clock of each block that was timed here, in the order of their ends.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}
        self.intervals: list[tuple[str, float, float]] = []
        self._threads = threading.local()  # `names`: the phases that a thread is in, the innermost last

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block, also when it raises."""
        self.seconds.setdefault(name, 0.0)
        around: list[str] = self._threads.__dict__.setdefault("names", [])
        around.append(name)
        begin = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            elapsed = end - begin
            self.intervals.append((name, begin, end))
            around.pop()
            self.seconds[name] += elapsed
            if around and not name.startswith(f"{around[-1]}/"):
                self.seconds[around[-1]] -= elapsed

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere, such as by the process that started this one."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def total_s(self) -> float:
        """Seconds of all phases that are not within another."""
        return sum(seconds for name, seconds in self.seconds.items() if name.rpartition("/")[0] not in self.seconds)

    def metrics(self, prefix: str = "startup/") -> dict[str, float]:
        """The same with names as metrics have them, such as ``startup/mesh_s``."""
        return {f"{prefix}{name}_s": seconds for name, seconds in self.seconds.items()}

    def __str__(self) -> str:
        """Such as ``1.32 s (import 1.10, mesh 0.22, mesh/tensor 0.20)``."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
        return f"{self.total_s:.2f} s ({parts})" if parts else "0.00 s"
