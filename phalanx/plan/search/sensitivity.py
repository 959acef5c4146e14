"""How much hangs on each choice: the best step for every value of it, and what changing it alone does.

Both are predictions of layouts, not of a model fitted to them: with everything else free the best layout that has the
value, and the layout that has it and is otherwise that of the best, as far as it can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.search.constraints import CHOICES
from phalanx.plan.search.frontier import Frontier
from phalanx.plan.search.result import Outcome, Sensitivity
from phalanx.plan.search.space import NUMERIC
from phalanx.plan.search.table import Mask

# Of a choice with more values those next to the best are looked at.
_VALUES = 12

_FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "pipeline": ("replicate", "shard", "zero", "chunks", "schedule"),
    "tensor": ("replicate", "shard", "zero", "tensor_overlap", "sequence_parallel"),
    "context": ("replicate", "shard", "zero", "context_method"),
    "shard": ("replicate", "zero"),
    "schedule": ("chunks",),
    "chunks": ("schedule",),
    "zero": ("replicate", "shard"),
    "sequence_parallel": ("tensor_overlap",),
}
"""What may have to change along with a choice: the number of devices stays, and a schedule has its own chunks."""


def sensitivities(frontier: Frontier, limit_bytes: float, best: int, effort: int) -> tuple[Sensitivity, ...]:
    """Of every choice that has more than one value, those on which most hangs first.

    Args:
        limit_bytes: that a layout may fill.
        best: the place of the best that fits.
        effort: predictions that one value may cost.
    """
    names = [name for name in (*NUMERIC, *CHOICES) if len(frontier.values(name)) > 1]
    columns = {name: frontier.column(name) for name in names}
    differs = {name: column != column[best] for name, column in columns.items()}
    differing = np.zeros(len(frontier), dtype=np.int8)
    for one in differs.values():
        differing += one
    found = []
    for name in names:
        if name != "replicate":  # follows from the others
            follows = [other for other in _FOLLOWS.get(name, ()) if other in differs]
            elsewhere = differing - sum((differs[other] for other in (name, *follows)), np.zeros_like(differing))
            near = np.flatnonzero(elsewhere == 0)
            changed = sum((differs[other][near] for other in follows), np.zeros(len(near), dtype=np.int8))
            found.append(_sensitivity(frontier, name, columns[name], limit_bytes, best, (near, changed), effort))
    return tuple(sorted(found, key=lambda one: -one.spread_s))


def _sensitivity(
    frontier: Frontier,
    name: str,
    column: NDArray[Any],
    limit_bytes: float,
    best: int,
    near: tuple[NDArray[np.int64], NDArray[np.int8]],
    effort: int,
) -> Sensitivity:
    """Of one choice; `near` are layouts that differ from the best in it and what follows it only, and in how much."""
    words = frontier.values(name)
    stored = words if name in frontier.space.columns else list(range(len(words)))
    here = stored.index(int(column[best]))
    begin = max(0, min(here - _VALUES // 2, len(stored) - _VALUES))
    outcomes = [
        _outcome(frontier, words[at], column == stored[at], limit_bytes, _nearest(*near, column, stored[at]), effort)
        for at in range(begin, min(begin + _VALUES, len(stored)))
    ]
    return Sensitivity(name, words[here], tuple(outcomes))


def _nearest(near: NDArray[np.int64], changed: NDArray[np.int8], column: NDArray[Any], value: Any) -> NDArray[np.int64]:
    """Of the layouts that have `value`, those in which least else changed."""
    has: Mask = column[near] == value
    least = np.min(changed[has], initial=np.iinfo(np.int8).max)
    found: NDArray[np.int64] = near[has & (changed == least)]
    return found


def _outcome(
    frontier: Frontier, value: Any, has: Mask, limit_bytes: float, near: NDArray[np.int64], effort: int
) -> Outcome:
    free = frontier.best(has, limit_bytes=limit_bytes, max_predictions=effort)
    only = np.zeros(len(frontier), dtype=np.bool_)
    only[near] = True
    alone = frontier.best(only, max_predictions=effort)
    return Outcome(
        value=value,
        best=frontier.prediction(free.places[0]) if free.places else None,
        lower_s=free.lower_s,
        proven=free.proven and alone.proven,
        least_bytes=float(np.min(frontier.memory_bytes[has])),
        alone=frontier.prediction(alone.places[0]) if alone.places else None,
    )
