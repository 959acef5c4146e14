"""A search from question to answer: enumerate, score, bound, and learn from the layouts around the best."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.plan.search.constraints import Constraints
from phalanx.plan.search.frontier import Best, Frontier
from phalanx.plan.search.nothing import nothing_fits, nothing_left
from phalanx.plan.search.options import Machine
from phalanx.plan.search.pareto import best_of_shapes, pareto_front, undominated
from phalanx.plan.search.result import SearchResult, Sensitivity
from phalanx.plan.search.scored import Costs
from phalanx.plan.search.sensitivity import sensitivities
from phalanx.plan.search.space import layouts
from phalanx.plan.search.table import Mask, Removed
from phalanx.plan.types import Job, Prediction

_BUDGET = 20_000
_EFFORT = 10


def search(
    job: Job,
    machine: Machine,
    costs: Costs,
    asked: Constraints | None = None,
    top: int = 10,
    max_predictions: int = _BUDGET,
    effort: int = _EFFORT,
) -> SearchResult:
    """The `top` fastest layouts of `job` on `machine` that `asked` allows and that fit, and what they teach.

    Args:
        max_predictions: layouts that are predicted in full at most; where it is reached, the result says that it is not
            proven.
        effort: predictions that each question beside the best may cost; with fewer, answers are less certain.

    Raises:
        UserError: no layout is possible, or none fits; the message says what to relax.
    """
    begun = time.perf_counter()
    asked = asked or Constraints()
    if machine.devices < 1:
        raise UserError("is no number of devices", cure="give at least 1", field="devices", value=machine.devices)
    space = layouts(job, machine, asked)
    if not space.count:
        raise nothing_left(job, machine, asked, space)
    frontier = Frontier(space, costs, max(max_predictions, 1))
    limit_bytes = asked.memory_bytes(machine.memory_bytes)
    may_fit = frontier.memory_bytes <= limit_bytes
    every = np.ones_like(may_fit)
    best = frontier.best(every, top, limit_bytes)
    if not best.places:
        raise nothing_fits(job, machine, costs, asked, float(frontier.memory_bytes.min()))
    shapes = tuple(best_of_shapes(frontier, limit_bytes, top, effort))
    front, front_proven = pareto_front(frontier, limit_bytes, effort)
    unlimited = frontier.best(every, max_predictions=effort)
    choices = sensitivities(frontier, limit_bytes, best.places[0], effort)
    return SearchResult(
        machine=machine,
        asked=asked,
        best=_predictions(frontier, best),
        # Where predictions were limited, neither comes in order, nor is each of the front on it.
        shapes=tuple(sorted(_predictions(frontier, *shapes), key=lambda one: one.step_s)),
        pareto=undominated([frontier.prediction(place) for place in front]),
        unlimited=frontier.prediction((*unlimited.places, best.places[0])[0]),
        sensitivities=choices,
        removed=(*space.removed, *_too_full(may_fit, limit_bytes)),
        candidates=space.count,
        fitting=int(np.count_nonzero(may_fit)),
        limit_bytes=limit_bytes,
        predicted=frontier.predicted,
        lower_s=best.lower_s,
        proven=best.proven and frontier.sound,
        all_proven=frontier.sound
        and all(one.proven for one in (best, unlimited, *shapes))
        and front_proven
        and _proven(choices),
        seconds=time.perf_counter() - begun,
    )


def _predictions(frontier: Frontier, *found: Best) -> tuple[Prediction, ...]:
    return tuple(frontier.prediction(place) for best in found for place in best.places)


def _proven(choices: Sequence[Sensitivity]) -> bool:
    return all(outcome.proven for choice in choices for outcome in choice.outcomes)


def _too_full(may_fit: Mask, limit_bytes: float) -> list[Removed]:
    """What memory takes away, if it does."""
    gone = len(may_fit) - int(np.count_nonzero(may_fit))
    if not gone:
        return []
    rule = f"at most {units.size(limit_bytes)} on the fullest rank"
    return [Removed(rule, "layouts", len(may_fit), gone, "raise memory<=, or take more devices")]
