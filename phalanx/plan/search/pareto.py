"""The layouts between which memory and time have to be weighed: no other is both leaner and as fast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from phalanx.plan.search.frontier import Best, Frontier
from phalanx.plan.search.result import memory_bytes
from phalanx.plan.types import Prediction

# Steps of memory over which a front is drawn.
_STEPS = 50


def pareto_front(frontier: Frontier, limit_bytes: float, effort: int) -> tuple[tuple[int, ...], bool]:
    """Places of the fastest layout for each step of memory up to `limit_bytes`, and whether all are proven.

    Each is on the exact front: none is as fast with less memory. Of those that lie within one step, the fastest is
    given.

    Args:
        effort: predictions that one step may cost.
    """
    highest = float(np.max(frontier.memory_bytes))
    step = min(limit_bytes, highest) / _STEPS
    found: list[Best] = []
    level = min(limit_bytes, highest)
    every = np.ones(len(frontier), dtype=np.bool_)
    while (best := frontier.best(every, limit_bytes=level, max_predictions=effort)).places:
        found.append(best)
        level = step * (math.ceil(frontier.memory_bytes[best.places[0]] / step) - 1)
    return tuple(best.places[0] for best in found), all(best.proven for best in found)


def best_of_shapes(frontier: Frontier, limit_bytes: float, count: int, effort: int) -> Iterator[Best]:
    """The best layout that fits, then the best that shares the devices in another way, and so on."""
    axes = {name: frontier.column(name) for name in ("pipeline", "replicate", "shard", "context", "tensor", "expert")}
    data = axes.pop("replicate") * axes.pop("shard")
    axes["data"] = data
    left = np.ones(len(frontier), dtype=np.bool_)
    for _ in range(count):
        best = frontier.best(left, limit_bytes=limit_bytes, max_predictions=effort)
        if not best.places:
            return
        yield best
        place = best.places[0]
        left &= np.logical_or.reduce([column != column[place] for column in axes.values()])


def undominated(predictions: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """Those for which no other is both as lean and as fast, leanest last."""
    found: list[Prediction] = []
    for one in sorted(predictions, key=lambda one: (memory_bytes(one), one.step_s)):
        if not found or one.step_s < found[-1].step_s:
            found.append(one)
    return tuple(reversed(found))
