"""Which stage holds which layers, and what one micro-batch takes on each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from phalanx.model.shapes import mean_keys
from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.split import cut
from phalanx.parallel.pipeline.tables import placement_of
from phalanx.plan.step.layers import Cost, Costs
from phalanx.plan.step.weights import Weights, layer_weights, of_embedding, of_head, of_kind
from phalanx.plan.types import Ints, Job, Model, Strategy
from phalanx.plan.work.operations import Passes


@dataclass(frozen=True)
class Stage:
    """What one stage holds.

    Attributes:
        layers: how many of each kind, as `Costs.kinds` orders them.
    """

    index: int
    rank: int
    chunk: int
    layers: tuple[int, ...]
    first: bool
    last: bool


def stages_of(job: Job, strategy: Strategy, kinds: Sequence[tuple[int, bool]]) -> tuple[Stage, ...]:
    """The stages of the pipeline, in the order of the model."""
    ranks, chunks = (strategy.pipeline, strategy.chunks) if strategy.pipeline > 1 else (1, 1)
    even = job.software.even_stages
    return _stages(job.model, job.sequence, even, strategy.schedule, ranks, chunks, tuple(kinds))


@lru_cache(maxsize=1024)
def _stages(
    model: Model,
    sequence: int,
    even: bool,
    schedule: Schedule,
    ranks: int,
    chunks: int,
    kinds: tuple[tuple[int, bool], ...],
) -> tuple[Stage, ...]:
    count = ranks * chunks
    bounds = stage_bounds(model, sequence, count, even)
    placement = placement_of(schedule, ranks, chunks) if count > 1 else None
    seen: Counter[int] = Counter()
    found = []
    for index in range(count):
        held = Counter(_kind(model, layer) for layer in range(bounds[index], bounds[index + 1]))
        rank = placement.rank_of(index) if placement else 0
        layers = tuple(held[kind] for kind in kinds)
        found.append(Stage(index, rank, seen[rank], layers, index == 0, index == count - 1))
        seen[rank] += 1
    return tuple(found)


def _kind(model: Model, layer: int) -> tuple[int, bool]:
    return model.window_of(layer), model.is_mixture(layer)


@lru_cache(maxsize=4096)
def stage_bounds(model: Model, sequence: int, stages: int, even: bool) -> tuple[int, ...]:
    """First layers of the stages, and the end of the last.

    Even: as many layers each, the first ones taking what does not divide. Else as `phalanx train` cuts: so that the
    stage with most FLOPs has as few as can be, embedding and head included.
    """
    if even:
        share, over = divmod(model.layers, stages)
        return tuple(index * share + min(index, over) for index in range(stages + 1))
    pieces = [_flops(model, sequence, layer) for layer in range(model.layers)]
    pieces[0] += 2.0 * model.hidden
    pieces[-1] += 6.0 * model.vocab_rows * model.hidden
    return tuple(cut(pieces, stages))


def _flops(model: Model, sequence: int, layer: int) -> float:
    """Forward and backward FLOPs of one token in `layer`, as `phalanx.parallel.pipeline.split` counts them."""
    return 3 * (
        2.0 * layer_weights(model, layer, active=True)
        + _per_key(model) * mean_keys(sequence, model.window_of(layer) or None)
    )


def _per_key(model: Model) -> float:
    return 4.0 * model.heads * model.head_dim


def model_flops(job: Job) -> float:
    """FLOPs of one step that count as useful: matrix products of forward and backward passes, causal attention by the
    keys that are seen (`phalanx.model.shapes.flops_per_token`)."""
    return job.tokens * _flops_per_token(job.model, job.sequence)


@lru_cache(maxsize=1024)
def _flops_per_token(model: Model, sequence: int) -> float:
    layers = sum(_flops(model, sequence, layer) for layer in range(model.layers))
    return layers + 6.0 * model.vocab_rows * model.hidden


T = TypeVar("T")


def each_once(stages: Sequence[Stage], of: Callable[[Stage], T]) -> list[T]:
    """`of` each stage, worked out once for all that hold the same."""
    known: dict[tuple, T] = {}
    found = []
    for stage in stages:
        key = (stage.layers, stage.first, stage.last)
        if key not in known:
            known[key] = of(stage)
        found.append(known[key])
    return found


def stage_passes(stage: Stage, costs: Costs) -> Passes:
    """Seconds of one micro-batch on `stage`."""
    return sum((cost.total * times for cost, times in held(stage, costs)), Passes())


def held(stage: Stage, costs: Costs) -> list[tuple[Cost, int]]:
    """The pieces of a stage, and how many of each."""
    ends = [(costs.embedding, 1)] * stage.first + [(costs.head, 1)] * stage.last
    return [*((cost, times) for cost, times in zip(costs.layers, stage.layers, strict=True) if times), *ends]


def of_stage(model: Model, stage: Stage, kinds: tuple[tuple[int, bool], ...], tensor: Ints, expert: Ints) -> Weights:
    """Weights of one stage."""
    total = Weights()
    for (_, is_mixture), count in zip(kinds, stage.layers, strict=True):
        if count:
            total += of_kind(model, is_mixture, tensor, expert) * count
    if stage.first:
        total += of_embedding(model, tensor)
    if stage.last:
        total += of_head(model, tensor, stage.first)
    return total


def held_by(stages: Sequence[Stage], costs: Costs) -> list[tuple[Cost, int]]:
    """The pieces of several stages together."""
    layers = tuple(map(sum, zip(*(stage.layers for stage in stages), strict=True)))
    first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
    return held(replace(stages[0], layers=layers, first=first, last=last), costs)
