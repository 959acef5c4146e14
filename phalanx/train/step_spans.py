"""The spans of the training loop itself: steps, what they wait for and what goes on between them.

Passes and collectives are recorded where they are made (`phalanx.train.trainer`, `phalanx.parallel`). A step is from
the wait for its batch until its snapshot has begun; an evaluation is no part of one, and what lies in it (its
collectives too) is noted under no step, so that the parts of a step add up to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from phalanx.core.phases import Phases
from phalanx.telemetry.spans import NONE, NOT_RECORDED, Recorder

Batch = TypeVar("Batch")

_LEAST_SNAPSHOT_NS = 100_000
"""Nearly every step looks whether a snapshot is due; what takes no longer than this is not worth a span."""


class StepSpans:
    """A rank's side; without a recorder nothing is recorded.

    Attributes:
        recorder: where all that belongs to the run is recorded.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self._step: Any = NOT_RECORDED
        self._update: Any = NOT_RECORDED

    def startup(self, phases: Phases, step: int) -> None:
        """Record what starting up went on, before `step`, the first one: it is noted under that."""
        recorder = self.recorder
        if recorder is None:
            return
        timed = {name for name, _, _ in phases.intervals}
        begin_s = min((begin for _, begin, _ in phases.intervals), default=recorder.clock_ns() * 1e-9)
        # What the process was started through comes first: only how long each took is known, and their order.
        before = [(name, seconds) for name, seconds in phases.seconds.items() if name not in timed]
        at_s = begin_s - sum(seconds for _, seconds in before)
        intervals = list(phases.intervals)
        for name, seconds in before:
            intervals.append((name, at_s, at_s + seconds))
            at_s += seconds
        for name, from_s, to_s in intervals:
            recorder.record(recorder.type("startup", name), round(from_s * 1e9), round(to_s * 1e9), step=step)

    def over(self, batches: Iterator[Batch], first: int) -> Iterator[Batch]:
        """The batches, of steps that are numbered from `first` on; a step begins with the wait for its own."""
        for step in itertools.count(first):
            recorder = self.recorder
            waiting: Any = NOT_RECORDED
            self._step = NOT_RECORDED
            if recorder is not None:
                recorder.step = step
                self._step = recorder.begin(recorder.type("step"))
                waiting = recorder.begin(recorder.type("data"))
            batch = next(batches, None)
            if batch is None:
                waiting.cancel()
                self._step.cancel()
                self._step = NOT_RECORDED
                self._no_step()
                return
            waiting.end()
            yield batch

    def begin_update(self) -> None:
        """All gradients are there."""
        if self.recorder is not None:
            self._update = self.recorder.begin(self.recorder.type("optimizer"))

    def end_update(self) -> None:
        """The weights are those of the next step."""
        self._update.end()

    def end_step(self) -> None:
        """All of a step is done."""
        if self.recorder is not None:
            self._step.end()
        self._no_step()

    def _no_step(self) -> None:
        if self.recorder is not None:
            self.recorder.step = NONE
            if self.recorder.device is not None:
                self.recorder.device.resolve()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Training stands still here for a snapshot, if one is taken."""
        recorder = self.recorder
        if recorder is None:
            yield
            return
        began_ns, copying = recorder.clock_ns(), recorder.begin(recorder.type("snapshot"))
        try:
            yield
        finally:
            if recorder.clock_ns() - began_ns >= _LEAST_SNAPSHOT_NS:
                copying.end()
            else:
                copying.cancel()

    def durable(self, step: int, took_s: float) -> None:
        """The checkpoint of a step has become durable, so many seconds after its copy was begun."""
        if self.recorder is not None:
            now_ns = self.recorder.clock_ns()
            self.recorder.record(self.recorder.type("persist"), now_ns - round(took_s * 1e9), now_ns, step=step)

    @contextmanager
    def evaluation(self, step: int) -> Iterator[None]:
        """The model is evaluated after a step."""
        recorder = self.recorder
        if recorder is None:
            yield
            return
        evaluation = recorder.type("evaluation")
        began_ns, recorder.step = recorder.clock_ns(), NONE
        recorder.enter(evaluation, began_ns)
        try:
            yield
        finally:
            recorder.record(evaluation, began_ns, recorder.clock_ns(), step=step)
