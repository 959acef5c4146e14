"""The first steps of a run compared with what was expected of them, and how long the parts of a step take."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from phalanx.core import units
from phalanx.core.files import write_json
from phalanx.data.batch import Batch
from phalanx.train.device import Device
from phalanx.train.predicted_cost import BETWEEN, LOADER, PASSES, WAITING, WORDS, Expected
from phalanx.train.run_progress import RunProgress

FILE = "prediction.json"
WARM_UP = 5
"""Steps in which caches, allocators and compilers settle."""
MEASURED = 10
_LEAST = 3
_LARGE = 0.15


@dataclass
class _Mark:
    """A moment: of the clock, or of the device's queue."""

    at_s: float = 0.0
    waited_s: float = 0.0
    event: torch.cuda.Event | None = None


class Laps:
    """Marks of time within steps.

    On a GPU a mark is an event in the device's queue: nothing waits for it before `medians` is called, and a part is
    what the device did in it. On a CPU it is the clock, and waiting for other ranks is a part of its own.

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
        rows = []
        for step in self._steps:
            row: dict[str, float] = defaultdict(float)
            for (_, begin), (name, end) in pairwise(step):
                if begin.event is not None and end.event is not None:
                    row[name] += float(begin.event.elapsed_time(end.event)) / 1e3
                else:
                    waited_s = end.waited_s - begin.waited_s
                    row[name] += end.at_s - begin.at_s - waited_s
                    row[WAITING] += waited_s
            rows.append(row)
        names = dict.fromkeys(name for row in rows for name in row)
        parts = {name: median(row.get(name, 0.0) for row in rows) for name in names}
        return median(sum(row.values()) for row in rows), parts

    def _mark(self) -> _Mark:
        if not self._on_gpu:
            return _Mark(self._clock(), self._waited_ns() * 1e-9)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return _Mark(event=event)


@dataclass(frozen=True)
class Measured:
    """What steps took, medians."""

    first: int  # first, last: steps, counted from 1
    last: int
    step_s: float
    parts: Mapping[str, float]  # seconds by name
    memory_bytes: float  # of this rank: tensors at their most on a GPU; on a CPU, what the process has grown by
    with_libraries: bool = False  # that includes what libraries took, too, so it is not compared with the prediction


class Watch:
    """Times a run's first steps, says how they compare with what was expected, and keeps both in the run folder.

    Args:
        expected: None: nothing is watched.
        note: shows a line to a person.
        layout: of the ranks, as `Layout` prints it.
        waited_ns: how long this rank has waited for others so far.
        base_bytes: memory of the process before anything of the run was made.
    """

    def __init__(
        self,
        expected: Expected | None,
        note: Callable[[str], None],
        folder: Path,
        device: Device,
        progress: RunProgress,
        layout: str,
        waited_ns: Callable[[], int],
        base_bytes: int = 0,
    ) -> None:
        self._expected, self._note, self._base_bytes = expected, note, base_bytes
        self._path, self._device, self._progress, self._waited_ns = folder / FILE, device, progress, waited_ns
        self._laps: Laps | None = None
        self._warm_from = progress.step + WARM_UP
        self._misfit = expected.misfit(layout, progress.micro_batch) if expected else ""

    def start(self, tokens_per_step: int, steps: int) -> None:
        """Say what is expected of the steps that are left, and write it down."""
        if self._expected is None:
            return
        self._note(expected_line(self._expected, tokens_per_step, steps))
        if self._misfit:
            self._note(f"  it is for {self._misfit}, and may be off by that")
        write_json(self._path, comparison(self._expected, None, self._misfit))

    def over(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches; a step begins with waiting for its own."""
        while True:
            if self._expected is not None and self._progress.step >= self._warm_from:
                if self._laps is None:
                    self._laps = Laps(self._device.torch_device, self._waited_ns)
                    if self._device.torch_device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()  # trying micro-batches is not part of a step
                self._laps.begin_step()
            batch = next(batches, None)
            if batch is None:
                return
            self.end(LOADER)
            yield batch

    def end(self, part: str) -> None:
        """A part of the step has ended."""
        if self._laps is not None:
            self._laps.end(part)

    def end_step(self, *, ending: bool) -> None:
        """A step has ended; when enough have, or the run is `ending`, they are compared, once."""
        self.end(BETWEEN)
        if self._laps is None or self._expected is None:
            return
        steps, last = self._laps.count, self._progress.step
        if steps >= MEASURED or (ending and steps >= _LEAST):
            memory_bytes = self._device.memory_in_use_bytes() - self._base_bytes
            on_cpu = self._device.torch_device.type == "cpu"
            measured = Measured(last - steps + 1, last, *self._laps.medians(), memory_bytes, with_libraries=on_cpu)
            self._note(difference_line(self._expected, measured))
            write_json(self._path, comparison(self._expected, measured, self._misfit))
            self._expected = self._laps = None


def expected_line(expected: Expected, tokens_per_step: int, steps: int) -> str:
    """What is expected of the run, in one line."""
    between = ""
    if expected.interval_s is not None:
        low_s, high_s = expected.interval_s
        between = f" ({_time(low_s)} to {_time(high_s)} in 8 of 10 cases)"
    return (
        f"expected: step {_time(expected.step_s)}{between}, {tokens_per_step / expected.step_s:,.0f} tokens/s, "
        f"{units.size(expected.memory_bytes)}, {steps} steps in {units.duration(steps * expected.step_s)} "
        f"({expected.source})"
    )


def difference_line(expected: Expected, measured: Measured) -> str:
    """How steps compare with what was expected; where they differ much, which part most of that is."""
    line = (
        f"measured over steps {measured.first} to {measured.last}: step {_time(measured.step_s)}, "
        f"{_more(measured.step_s, expected.step_s)}; memory {units.size(measured.memory_bytes)}, "
    )
    line += "libraries included" if measured.with_libraries else _more(measured.memory_bytes, expected.memory_bytes)
    if abs(difference(measured.step_s, expected.step_s)) <= _LARGE:
        return line
    name = most_off(expected, measured)
    was, wanted = measured.parts.get(name, 0.0), comparable_parts(expected, measured).get(name, 0.0)
    return f"{line}\n  most of the difference: {WORDS[name]}, {_time(was)} where {_time(wanted)} was expected"


def difference(measured: float, expected: float) -> float:
    """How much more was measured than expected, ratio."""
    return measured / expected - 1 if expected else 0.0


def comparable_parts(expected: Expected, measured: Measured) -> dict[str, float]:
    """The expected parts as far as they could be measured: on a GPU, waiting for others lies within the passes."""
    parts = dict(expected.parts)
    if WAITING not in measured.parts:
        parts[PASSES] = parts.get(PASSES, 0.0) + parts.pop(WAITING, 0.0)
    return parts


def most_off(expected: Expected, measured: Measured) -> str:
    """The part that explains most of the difference of the step."""
    sign = 1 if measured.step_s >= expected.step_s else -1
    wanted = comparable_parts(expected, measured)
    names = [*measured.parts, *(name for name in wanted if name not in measured.parts)]
    return max(names, key=lambda name: sign * (measured.parts.get(name, 0.0) - wanted.get(name, 0.0)))


def comparison(expected: Expected, measured: Measured | None, misfit: str) -> dict[str, Any]:
    """Both as JSON values, with units in the keys."""

    def with_units(value: Expected | Measured) -> dict[str, Any]:
        parts = {f"{name}_s": seconds for name, seconds in value.parts.items()}
        return {name: item for name, item in asdict(value).items() if name != "details"} | {"parts": parts}

    compared: dict[str, Any] = {"expected": with_units(expected), "measured": None}
    if measured is not None:
        compared["measured"] = with_units(measured)
        compared["step_difference_ratio"] = difference(measured.step_s, expected.step_s)
        if not measured.with_libraries:
            compared["memory_difference_ratio"] = difference(measured.memory_bytes, expected.memory_bytes)
        compared["most_off"] = most_off(expected, measured)
    return {"version": 1, **compared, "misfit": misfit, "prediction": dict(expected.details)}


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _more(measured: float, expected: float) -> str:
    """``5.7 % more than expected``."""
    ratio = difference(measured, expected)
    if ratio > 1:
        return f"{ratio + 1:.1f} times what was expected"
    return f"{100 * abs(ratio):.1f} % {'more' if ratio >= 0 else 'less'} than expected"
