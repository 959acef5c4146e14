"""A search from question to answer: enumerate, score, bound, and learn from the layouts around the best.

Beside the best layouts, a `SearchResult` has those between which memory and time have to be weighed (no other is both
leaner and as fast), and how much depends on each choice: the best step for every value of it, and what changing it
alone does. Both are predictions of layouts, not of a model fitted to them.

`reliefs` answers what a layout that does not fit could do with its memory on the same ranks; where no layout is left,
the error says which constraints took them away, and what is cheapest to relax.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core import units
from phalanx.core.errors import UserError
from phalanx.plan.search.constraints import CHOICES, Constraints, SearchTarget, options_of, parse
from phalanx.plan.search.frontier import Best, CostModel, Frontier, memory_bytes, scored
from phalanx.plan.search.space import NUMERIC, Mask, Removed, SearchSpace, layouts
from phalanx.plan.types import Job, Prediction, Strategy

_BUDGET = 20_000
_EFFORT = 10


def search(
    job: Job,
    machine: SearchTarget,
    costs: CostModel,
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
    removed, fitting = list(space.removed), int(np.count_nonzero(may_fit))
    if gone := len(may_fit) - fitting:
        rule, cure = f"at most {units.size(limit_bytes)} on the fullest rank", "raise memory<=, or take more devices"
        removed.append(Removed(rule, "layouts", len(may_fit), gone, cure))
    return SearchResult(
        machine=machine,
        asked=asked,
        best=_predictions(frontier, best),
        # Where predictions were limited, neither comes in order, nor is each of the front on it.
        shapes=tuple(sorted(_predictions(frontier, *shapes), key=lambda one: one.step_s)),
        pareto=undominated([frontier.prediction(place) for place in front]),
        unlimited=frontier.prediction((*unlimited.places, best.places[0])[0]),
        sensitivities=choices,
        removed=tuple(removed),
        candidates=space.count,
        fitting=fitting,
        limit_bytes=limit_bytes,
        predicted=frontier.predicted,
        lower_s=best.lower_s,
        proven=best.proven and frontier.sound,
        all_proven=frontier.sound
        and all(one.proven for one in (best, unlimited, *shapes))
        and front_proven
        and all(outcome.proven for choice in choices for outcome in choice.outcomes),
        seconds=time.perf_counter() - begun,
    )


def _predictions(frontier: Frontier, *found: Best) -> tuple[Prediction, ...]:
    return tuple(frontier.prediction(place) for best in found for place in best.places)


@dataclass(frozen=True)
class ChoiceOutcome:
    """What one value of a choice comes to."""

    value: Any
    # The fastest layout with it that fits, everything else being free; None where none fits, or, if it is not proven,
    # where none was predicted any more.
    best: Prediction | None
    lower_s: float  # no layout with it that fits is faster, seconds; the step time of `best` where that is proven
    proven: bool  # it is certain that no other is faster
    least_bytes: float  # what the leanest layout with it needs at least
    # The layout that differs from the best of all in this choice, and as little as it then must in others; None where
    # the rules allow none. It may not fit.
    alone: Prediction | None


@dataclass(frozen=True)
class Sensitivity:
    """How much hangs on one choice."""

    choice: str  # its name, as constraints have it
    value: Any  # what the best layout has
    outcomes: tuple[ChoiceOutcome, ...]  # one for each value, in order; of many values those next to the best

    @property
    def spread_s(self) -> float:
        """How much longer a step takes with the worst value that can be had, everything else being at its best."""
        steps = [outcome.best.step_s for outcome in self.outcomes if outcome.best]
        return max(steps) - min(steps) if steps else 0.0


@dataclass(frozen=True)
class SearchResult:
    """The best layouts of a job on a machine, and what was learnt on the way."""

    machine: SearchTarget
    asked: Constraints
    best: tuple[Prediction, ...]  # fastest first, of all that fit
    # The best for each way to share the devices, fastest first; `best` may hold many small variations of one.
    shapes: tuple[Prediction, ...]
    # Layouts for which no other is both faster and leaner, leanest last: the best for each fiftieth of the memory that
    # may be filled.
    pareto: tuple[Prediction, ...]
    unlimited: Prediction  # the best layout if memory had no limit; it is `best[0]` where memory costs nothing
    sensitivities: tuple[Sensitivity, ...]  # those on which most hangs first
    removed: tuple[Removed, ...]  # what each rule took away, in order; the last one is memory
    candidates: int  # layouts after all rules but memory
    fitting: int  # those of them that may fit: by a bound of their memory, which few exceed when they are predicted
    limit_bytes: float
    predicted: int
    lower_s: float  # no layout outside `best` is faster than this, seconds
    # It is certain that `best` are the best; else the number of predictions was limited, or the cost model gave a bound
    # that one of them is below.
    proven: bool
    all_proven: bool  # everything else here is certain, too; what is not says so, where it has a place for it
    seconds: float


# Steps of memory over which a front is drawn.
_STEPS = 50


def pareto_front(frontier: Frontier, limit_bytes: float, effort: int) -> tuple[tuple[int, ...], bool]:
    """Places of the fastest layout for each step of memory up to `limit_bytes`, and whether all are proven.

    Each is on the exact front: none is as fast with less memory. Of those that lie within one step, the fastest is
    given.
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
    """Of every choice that has more than one value, those on which most hangs first."""
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
    has: Mask = column[near] == value
    least = np.min(changed[has], initial=np.iinfo(np.int8).max)
    found: NDArray[np.int64] = near[has & (changed == least)]
    return found


def _outcome(
    frontier: Frontier, value: Any, has: Mask, limit_bytes: float, near: NDArray[np.int64], effort: int
) -> ChoiceOutcome:
    free = frontier.best(has, limit_bytes=limit_bytes, max_predictions=effort)
    only = np.zeros(len(frontier), dtype=np.bool_)
    only[near] = True
    alone = frontier.best(only, max_predictions=effort)
    return ChoiceOutcome(
        value=value,
        best=frontier.prediction(free.places[0]) if free.places else None,
        lower_s=free.lower_s,
        proven=free.proven and alone.proven,
        least_bytes=float(np.min(frontier.memory_bytes[has])),
        alone=frontier.prediction(alone.places[0]) if alone.places else None,
    )


_AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")
_ANY = ("inside_host=none", "context_tokens=any", "imbalance=any")


def reliefs(
    job: Job, strategy: Strategy, machine: SearchTarget, costs: CostModel, most: int = 3
) -> tuple[Prediction, ...]:
    """The fastest layouts that fit and share the devices as `strategy` does; none where none fits.

    They differ from it in the micro-batch, in what is computed again, and in what of the state is split.
    """
    try:
        asked = _like(strategy)
        # What no setting says is no cure: attention alone is computed again by other programs, by keys of theirs.
        levels = tuple(level for level in options_of(job, machine, asked)["recompute"] if level != "attention")
        asked = replace(asked, choices={**asked.choices, "recompute": levels})
        return search(job, machine, costs, asked, most).best
    except UserError:  # nothing fits, or the program of this layout can do what a search does not try
        return ()


def _like(strategy: Strategy) -> Constraints:
    kept = [f"{axis}={getattr(strategy, axis)}" for axis in _AXES]
    if strategy.pipeline > 1:
        kept += [f"schedule={strategy.schedule}", f"chunks={strategy.chunks}"]
    if strategy.tensor > 1:
        kept.append(f"tensor_overlap={strategy.tensor_overlap}")
    if strategy.context > 1:
        kept.append(f"context_method={strategy.context_method}")
    return parse([*kept, *_ANY])


# Without a bound that is there by default a space can be ten times as large: it is not searched only for an error.
_TOO_MANY = 2_000_000
# How far other numbers of devices are looked for, each way.
_NEAR = 128


def nothing_left(job: Job, machine: SearchTarget, asked: Constraints, space: SearchSpace) -> UserError:
    """The error for a space that is empty by its rules."""
    # Each rule with what it took away, those of one kind after another
    kinds = dict.fromkeys(one.of for one in space.removed)
    problem = _problem(
        job,
        machine,
        "; ".join(
            f"of {next(one.before for one in space.removed if one.of == kind):,} {kind} "
            + ", ".join(f"{one.removed:,} by '{one.rule}'" for one in space.removed if one.of == kind)
            for kind in kinds
        ),
    )
    for cure, other in _relaxations(asked):
        if count := layouts(job, machine, other).count:
            return UserError(problem, cure=f"{cure}: {count:,} layouts are left then")
    near = " or ".join(f"{devices:,}" for devices in _near(job, machine, asked))
    if near:
        return UserError(problem, cure=f"take {near} devices")
    cures = (one.cure for one in reversed(space.removed) if one.left == 0)  # of the rule that left nothing
    return UserError(problem, cure=next(cures, "take another number of devices"))


def nothing_fits(
    job: Job, machine: SearchTarget, costs: CostModel, asked: Constraints, least_bytes: float
) -> UserError:
    """The error where the leanest layout, of `least_bytes`, is too large for a device."""
    limit_bytes = asked.memory_bytes(machine.memory_bytes)
    problem = (
        f"no layout of {machine.devices:,} devices fits: the leanest needs {units.size(least_bytes)} on its fullest "
        f"rank, of {units.size(limit_bytes)} that may be filled"
    )
    for cure, other in _relaxations(asked):
        space = layouts(job, machine, other)
        if space.count <= _TOO_MANY and space.count:
            leanest = float(scored(space, costs).memory_bytes.min())
            if leanest <= other.memory_bytes(machine.memory_bytes):
                return UserError(problem, cure=f"{cure}: about {units.size(leanest)} are enough then")
    return UserError(problem, cure="take more devices, devices with more memory, or a smaller model")


def _relaxations(asked: Constraints) -> Iterator[tuple[str, Constraints]]:
    """Each thing that was asked for left out by itself, and how to say it: first what nobody asked for."""
    without = {bound: tuple(one for one in asked.bounds if one is not bound) for bound in asked.bounds}
    if asked.memory < 1:
        yield "write 'memory<=1'", replace(asked, memory=1.0)
    for bound in asked.bounds:
        if bound.default:
            yield f"write {bound.name}=any", replace(asked, bounds=without[bound])
    if asked.inside_host:
        yield "write inside_host=none", replace(asked, inside_host=())
    for name in asked.choices:
        yield f"leave out {name}=", replace(asked, choices={k: v for k, v in asked.choices.items() if k != name})
    for bound in asked.bounds:
        if not bound.default:
            yield f"leave out {bound.text}", replace(asked, bounds=without[bound])


def _near(job: Job, machine: SearchTarget, asked: Constraints) -> Iterator[int]:
    below = range(machine.devices - 1, max(machine.devices - _NEAR, 0), -1)
    for numbers in (below, range(machine.devices + 1, machine.devices + _NEAR)):
        there = (n for n in numbers if layouts(job, replace(machine, devices=n), asked).count)
        yield from itertools.islice(there, 1)


def _problem(job: Job, machine: SearchTarget, reason: str) -> str:
    return (
        f"no layout of {machine.devices:,} device{'s' * (machine.devices > 1)} is left for {job.model.layers} layers, "
        f"{job.model.kv_heads} key/value heads, sequences of {job.sequence:,} tokens and a global batch of "
        f"{job.global_batch:,}: {reason}"
    )
