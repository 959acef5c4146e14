"""Times of many cases that take turns, so that whatever slows the machine for a while slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from phalanx.checks.calibration.calibration_messages import Precision, Timing
from phalanx.parallel.group import Group

_LEAST_S = 0.003  # of one turn: far above what the clock and the loop take
_MOST_CALLS = 300
_LEAST_ROUNDS = 3

# On a GPU. Its queue holds about 1,024 kernels: with more, the host would have to wait for the device after all.
_MOST_QUEUED = 50
_LEAD, _MOST_LEAD_S = 1.5, 0.5  # of what the host took before
_CYCLES_PER_S = 2e9  # no GPU's clock is faster by much


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        what, sizes, precision: as in `Timing`.
        run: does it once, and leaves everything ready to do it again.
        calls_each: how many such things `run` does.
    """

    what: str
    sizes: Mapping[str, float]
    precision: Precision
    run: Callable[[], object]
    calls_each: int = 1


@dataclass(frozen=True)
class Stopwatch:
    """Measures cases on one rank, in step with the others.

    Attributes:
        rounds: turns of each case; a long one has three at most.
        long_s: a case that takes longer is a long one.
    """

    device: torch.device
    group: Group
    rounds: int
    long_s: float = 0.05
    clock: Callable[[], float] = time.perf_counter
    _host_s: dict[int, float] = field(default_factory=dict)

    def measure(self, cases: Sequence[Case]) -> list[Timing]:
        """The median time of each case; ranks must have the same cases."""
        calls = [self._calls(case) for case in cases]
        taken: list[list[float]] = [[] for _ in cases]
        for turn in range(self.rounds):
            for case, (count, rounds), times in zip(cases, calls, taken, strict=True):
                if turn < rounds:
                    self.group.barrier()
                    times.append(self._seconds(case, count) / count / case.calls_each)
        return [
            Timing(case.what, case.sizes, case.precision, statistics.median(times), _spread(times))
            for case, times in zip(cases, taken, strict=True)
        ]

    def _calls(self, case: Case) -> tuple[int, int]:
        """Calls of one turn, and turns, the same on all ranks; the first run warms up and does not count.

        Whether there is a second one is said by rank 0, too: a case may be a collective.
        """
        self.group.barrier()
        seconds = self._of_first_rank(self._seconds(case, 1))
        if seconds < self.long_s:
            seconds = self._of_first_rank(self._seconds(case, 1))
        rounds = self.rounds if seconds < self.long_s else min(self.rounds, _LEAST_ROUNDS)
        most = _MOST_CALLS if self.device.type == "cpu" else _MOST_QUEUED
        return round(min(most, max(1.0, _LEAST_S / max(seconds, 1e-9)))), rounds

    def _of_first_rank(self, seconds: float) -> float:
        shared = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        self.group.broadcast(shared).wait()
        return shared.item()

    def _seconds(self, case: Case, count: int) -> float:
        if self.device.type == "cuda":
            return self._device_seconds(case, count)
        began_s = self.clock()
        for _ in range(count):
            case.run()
        return self.clock() - began_s

    def _device_seconds(self, case: Case, count: int) -> float:
        """Between two events, so that the host's part is left out.

        The device is kept busy before the first until the host has asked for everything: a small kernel takes the host
        longer than the device, which would wait for the next one between the events.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)
        lead_s = min(_MOST_LEAD_S, _LEAD * count * self._host_s.get(id(case), 0.0))
        if lead_s:
            torch.cuda._sleep(int(lead_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
        begin.record()
        began_s = self.clock()
        for _ in range(count):
            case.run()
        self._host_s[id(case)] = (self.clock() - began_s) / count
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _spread(times: Sequence[float]) -> float:
    if len(times) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


class Pool:
    """Random operands of any shape out of one block that is larger than the caches.

    In a step a kernel finds its operands in memory, or in a cache that others have used since; measured over and over
    on the same ones, small kernels would be faster than they ever are there.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, elements: int) -> None:
        self.device = device
        generator = torch.Generator(device=device).manual_seed(0)
        self._block = torch.randn(elements, device=device, generator=generator).to(dtype)
        self._next = 0

    def take(self, *shape: int) -> torch.Tensor:
        """The next operand; no copy."""
        count = 1
        for size in shape:
            count *= size
        assert count <= len(self._block), f"an operand of {count} elements out of a pool of {len(self._block)}"
        if self._next + count > len(self._block):
            self._next = 0
        start, self._next = self._next, self._next + -(-count // 16) * 16
        return self._block[start : start + count].view(shape)
