"""The newest figures of a run, read from its metrics.jsonl as lines come: for alerts, and for what Prometheus reads."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.core.files import open_regular
from phalanx.telemetry.alerts.alert_rules import StepFigures, Stretch
from phalanx.telemetry.loggers import parse_line

_KEPT = 512
_FIRST_BYTES = 1 << 20  # so much of an old file is read at first
_MOST_BYTES = 8 << 20  # at one look
_STRANGE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_NOT_PLAIN = ("evaluation", "checkpoint", "snapshot")


class MetricsTail:
    """New lines of a metrics.jsonl, which a run may put another in place of when it goes on from a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset, self._part = 0, 0, b""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Entries that came since the last time, and whether they are those of another file."""
        try:
            with open_regular(self._path) as file:
                found = os.fstat(file.fileno())
                is_anew = found.st_ino != self._inode or found.st_size < self._offset
                if is_anew:
                    self._inode, self._part = found.st_ino, b""
                    self._offset = max(0, found.st_size - _FIRST_BYTES)
                file.seek(self._offset)
                block = file.read(_MOST_BYTES)
        except OSError:
            return [], False
        self._offset += len(block)
        *lines, self._part = (self._part + block).split(b"\n")
        return [entry for line in lines if (entry := parse_line(line + b"\n")) is not None], is_anew


class MetricsHistory:
    """What the lines of a run say, for one thread.

    Attributes:
        steps, stretches: the newest, oldest first; `stretches` are of this start alone.
        newest, evaluation: the newest line of each; empty: there is none.
        saved_step: of the newest durable checkpoint in the file; None: it names none.
        saved_at_s: when it was seen to be durable, seconds since 1970.
        saved_bytes: of the newest one; 0: not known.
        problem: why a later one is not durable; empty: there is none.
        counts: of this start: ``steps``, ``skipped``, ``tokens``, ``checkpoints``, ``evaluations``.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._tail, self._clock = MetricsTail(path), clock
        self.steps: deque[StepFigures] = deque(maxlen=_KEPT)
        self.stretches: deque[Stretch] = deque(maxlen=_KEPT)
        self.newest: Mapping[str, Any] = {}
        self.evaluation: Mapping[str, Any] = {}
        self.saved_step: int | None = None
        self.saved_at_s = clock()
        self.saved_bytes = 0
        self.problem = ""
        self.counts = dict.fromkeys(("steps", "skipped", "tokens", "checkpoints", "evaluations"), 0)
        self._open: list[Stretch] = []  # the stretch that may still grow
        self._is_plain = True
        self._is_first = True  # the first stretch of a start warms up and compiles
        self._is_first_look = True

    def take(self, begin_step: int | None = None) -> int:
        """Read what is new; the number of steps among it.

        Args:
            begin_step: lines of steps up to this one are of earlier starts; None: all that lie there at first are.
        """
        entries, is_anew = self._tail.read()
        first_new = 0
        if is_anew and (self._is_first_look or self.newest):
            first_new = self._first_of_this_start(entries, begin_step)
            self._forget()
        self._is_first_look = False
        return sum(self._add(entry, is_new=index >= first_new) for index, entry in enumerate(entries))

    def _first_of_this_start(self, entries: list[dict[str, Any]], begin_step: int | None) -> int:
        if begin_step is None:
            return len(entries)
        later = (i for i, entry in enumerate(entries) if entry["kind"] == "step" and entry["step"] > begin_step)
        return next(later, len(entries))

    def _forget(self) -> None:
        """What another file begins with takes the place of what was known."""
        self.steps.clear()
        self.stretches.clear()
        self._open, self._is_first, self._is_plain = [], True, True
        self.saved_step, self.problem = None, ""

    def _add(self, entry: Mapping[str, Any], *, is_new: bool) -> bool:
        kind = entry["kind"]
        if kind == "step":
            self._add_step(entry, is_new=is_new)
            return is_new
        if kind == "checkpoint":
            self._add_checkpoint(entry, is_new=is_new)
        elif kind == "evaluation":
            self.evaluation = entry
            self.counts["evaluations"] += is_new
        elif kind == "start":
            self._open, self._is_first = [], True
            self.stretches.clear()
        if kind in _NOT_PLAIN:
            self._is_plain = False
        return False

    def _add_step(self, entry: Mapping[str, Any], *, is_new: bool) -> None:
        step_s = figure(entry, "step_s")
        figures = StepFigures(
            entry["step"], figure(entry, "loss"), figure(entry, "grad_norm"), step_s, bool(entry.get("skipped"))
        )
        tokens = figure(entry, "tokens")
        if is_new:
            self.counts["steps"] += 1
            self.counts["skipped"] += figures.is_skipped
            before = figure(self.newest, "tokens")
            self.counts["tokens"] += int(max((tokens or 0.0) - (before or 0.0), 0.0))
            self._add_to_stretch(figures, figure(entry, "tokens_per_s"))
        self.steps.append(figures)
        self.newest = entry

    def _add_to_stretch(self, figures: StepFigures, rate: float | None) -> None:
        """Steps that were reported together carry the same rate, which is that of all of them."""
        if rate is None or not figures.step_s or not math.isfinite(rate):
            return
        if self._open and self._open[0].tokens_per_s == rate:
            self._open.append(Stretch(rate, figures.step_s, figures.step))
            return
        if self._open and not self._is_first:
            seconds = sum(one.seconds for one in self._open)
            self.stretches.append(
                Stretch(self._open[0].tokens_per_s, seconds, self._open[-1].last_step, self._is_plain)
            )
        self._is_first = self._is_first and not self._open
        self._open, self._is_plain = [Stretch(rate, figures.step_s, figures.step)], True

    def _add_checkpoint(self, entry: Mapping[str, Any], *, is_new: bool) -> None:
        problem = entry.get("checkpoint/problem")
        if not entry.get("checkpoint/name"):
            self.problem = str(problem) if problem else self.problem
            return
        self.saved_step, self.saved_at_s, self.problem = entry["step"], self._clock(), ""
        self.saved_bytes = int(figure(entry, "checkpoint/persist_bytes") or 0) or self.saved_bytes
        self.counts["checkpoints"] += is_new


def figure(entry: Mapping[str, Any], name: str) -> float | None:
    """A number of a line, also one that is not finite; None: it has none."""
    value = entry.get(name)
    strange = entry.get("not_finite")
    if value is None and isinstance(strange, dict):
        return _STRANGE.get(str(strange.get(name)))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
