"""How long the parts of a step take, without making it longer."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

from phalanx.train.expected import WAITING


class Laps:
    """Marks of time within steps.

    On a GPU a mark is an event in the device's queue: nothing waits for it before `medians` is asked for, and a part is
    what the device did in it. On a CPU it is the clock, and what was waited for other ranks is told apart.

    Args:
        device: that computes.
        waited_ns: how long this rank has waited for others so far.
        clock: seconds, monotonic; of a CPU.
    """

    def __init__(
        self, device: torch.device, waited_ns: Callable[[], int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._on_gpu = device.type == "cuda"
        self._waited_ns, self._clock = waited_ns, clock
        self._steps: list[list[tuple[str, _Mark]]] = []

    @property
    def count(self) -> int:
        """Steps that have begun."""
        return len(self._steps)

    def begin_step(self) -> None:
        """A step begins, and its first part."""
        self._steps.append([("", self._mark())])

    def end(self, name: str) -> None:
        """A part ends here that began where the last one ended."""
        self._steps[-1].append((name, self._mark()))

    def medians(self) -> tuple[float, dict[str, float]]:
        """Seconds of a whole step, and of each part: medians over all steps. Waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        rows = [self._row(step) for step in self._steps]
        names = dict.fromkeys(name for row in rows for name in row)
        parts = {name: median(row.get(name, 0.0) for row in rows) for name in names}
        return median(sum(row.values()) for row in rows), parts

    def _row(self, step: list[tuple[str, _Mark]]) -> dict[str, float]:
        row: dict[str, float] = defaultdict(float)
        for (_, begin), (name, end) in pairwise(step):
            waited_s = 0.0 if self._on_gpu else end.waited_s - begin.waited_s
            row[name] += begin.until_s(end) - waited_s
            if not self._on_gpu:
                row[WAITING] += waited_s
        return dict(row)

    def _mark(self) -> _Mark:
        if not self._on_gpu:
            return _Mark(self._clock(), self._waited_ns() * 1e-9)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return _Mark(event=event)


class _Mark:
    """A moment: of the clock, or of the device's queue."""

    def __init__(self, at_s: float = 0.0, waited_s: float = 0.0, event: torch.cuda.Event | None = None) -> None:
        self._at_s, self.waited_s, self._event = at_s, waited_s, event

    def until_s(self, other: _Mark) -> float:
        """Seconds from here to there."""
        if self._event is not None and other._event is not None:
            return float(self._event.elapsed_time(other._event)) / 1e3
        return other._at_s - self._at_s
