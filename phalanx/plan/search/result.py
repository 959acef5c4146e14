"""What a search finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.plan.search.constraints import Constraints
from phalanx.plan.search.frontier import memory_bytes as memory_bytes
from phalanx.plan.search.options import Machine
from phalanx.plan.search.table import Removed
from phalanx.plan.types import Prediction


@dataclass(frozen=True)
class Outcome:
    """What one value of a choice comes to.

    Attributes:
        best: the fastest layout with it that fits, everything else being free; None where none fits, or,
            if it is not proven, where none was predicted any more.
        lower_s: no layout with it that fits is faster, seconds; the step time of `best` where that is proven.
        proven: it is certain that no other is faster.
        least_bytes: what the leanest layout with it needs at least.
        alone: the layout that differs from the best of all in this choice, and as little as it then must in others;
            None where the rules allow none. It may not fit.
    """

    value: Any
    best: Prediction | None
    lower_s: float
    proven: bool
    least_bytes: float
    alone: Prediction | None


@dataclass(frozen=True)
class Sensitivity:
    """How much hangs on one choice.

    Attributes:
        choice: its name, as constraints have it.
        value: what the best layout has.
        outcomes: one for each value, in order; of many values those next to the best.
    """

    choice: str
    value: Any
    outcomes: tuple[Outcome, ...]

    @property
    def spread_s(self) -> float:
        """How much longer a step takes with the worst value that can be had, everything else being at its best."""
        steps = [outcome.best.step_s for outcome in self.outcomes if outcome.best]
        return max(steps) - min(steps) if steps else 0.0


@dataclass(frozen=True)
class SearchResult:
    """The best layouts of a job on a machine, and what was learnt on the way.

    Attributes:
        best: fastest first, of all that fit.
        shapes: the best for each way to share the devices, fastest first; `best` may hold many small variations of one.
        pareto: layouts for which no other is both faster and leaner, leanest last: the best for each fiftieth of the
            memory that may be filled.
        unlimited: the best layout if memory had no limit; it is `best[0]` where memory costs nothing.
        sensitivities: those on which most hangs first.
        removed: what each rule took away, in order; the last one is memory.
        candidates: layouts after all rules but memory.
        fitting: those of them that may fit: by a bound of their memory, which few exceed when they are predicted.
        limit_bytes: what a layout was allowed to fill of each device.
        predicted: layouts that were predicted in full; all others were bounded away.
        lower_s: no layout outside `best` is faster than this, seconds.
        proven: it is certain that `best` are the best; else the number of predictions was limited, or the cost model
            gave a bound that one of them is below.
        all_proven: everything else here is certain, too; what is not says so, where it has a place for it.
        seconds: that the search took.
    """

    machine: Machine
    asked: Constraints
    best: tuple[Prediction, ...]
    shapes: tuple[Prediction, ...]
    pareto: tuple[Prediction, ...]
    unlimited: Prediction
    sensitivities: tuple[Sensitivity, ...]
    removed: tuple[Removed, ...]
    candidates: int
    fitting: int
    limit_bytes: float
    predicted: int
    lower_s: float
    proven: bool
    all_proven: bool
    seconds: float
