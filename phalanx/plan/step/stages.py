"""Which stage holds which layers, and what one micro-batch takes on each stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from phalanx.model.shapes import mean_keys
from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import placement_of
from phalanx.parallel.pipeline.split import cut
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


@dataclass(frozen=True)
class Share:
    """What one pipeline rank has of the model.

    Attributes:
        layers: of each kind, in all its chunks.
        first: it has the embedding.
        last: it has the loss head.
        at_end: it is the last of the pipeline.
    """

    layers: tuple[Ints, ...]
    first: bool
    last: bool
    at_end: bool


def _share(chunks: Sequence[Stage], *, at_end: bool) -> Share:
    layers = tuple(map(sum, zip(*(stage.layers for stage in chunks), strict=True)))
    return Share(layers, any(stage.first for stage in chunks), any(stage.last for stage in chunks), at_end)


class Stages(tuple[Stage, ...]):
    """The stages of a pipeline, in the order of the model. Few of them differ, so that each is worked out once."""

    @cached_property
    def _which(self) -> tuple[list[Stage], list[int]]:
        """The first stage of all that hold the same; and which of these each stage is like."""
        numbers: dict[tuple, int] = {}
        different: list[Stage] = []
        which = []
        for stage in self:
            key = (stage.layers, stage.first, stage.last)
            if key not in numbers:
                numbers[key] = len(different)
                different.append(stage)
            which.append(numbers[key])
        return different, which

    @property
    def different(self) -> list[Stage]:
        """One of all stages that hold the same."""
        return self._which[0]

    @cached_property
    def alike(self) -> NDArray[np.int64]:
        """The number in `different` of every stage."""
        return np.array(self._which[1])

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """The number in `different` of what is on every rank, by chunk and rank."""
        ranks = 1 + max(stage.rank for stage in self)
        places = np.empty((len(self) // ranks, ranks), np.int64)
        for stage, number in zip(self, self._which[1], strict=True):
            places[stage.chunk, stage.rank] = number
        return places

    @cached_property
    def shares(self) -> list[Share]:
        """What every pipeline rank has of the model."""
        columns = [[self.different[number] for number in numbers] for numbers in self.places.T]
        return [_share(chunks, at_end=rank == len(columns) - 1) for rank, chunks in enumerate(columns)]


def stages_of(job: Job, strategy: Strategy, kinds: Sequence[tuple[int, bool]]) -> Stages:
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
) -> Stages:
    count = ranks * chunks
    bounds = stage_bounds(model, sequence, count, even)
    placement = placement_of(schedule, ranks, chunks) if count > 1 else None
    kind_of = [kinds.index((model.window_of(layer), model.is_mixture(layer))) for layer in range(model.layers)]
    found = []
    for index, (begin, end) in enumerate(itertools.pairwise(bounds)):
        held = kind_of[begin:end]
        layers = tuple([held.count(kind) for kind in range(len(kinds))])
        rank = placement.rank_of(index) if placement else 0  # a rank has one stage in each lap over all ranks
        found.append(Stage(index, rank, index // ranks, layers, index == 0, index == count - 1))
    return Stages(found)


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


def stage_passes(stage: Stage, costs: Costs) -> Passes:
    """Seconds of one micro-batch on `stage`."""
    return Passes.sum(cost.total * times for cost, times in held_by(stage, costs))


def held_by(part: Stage | Share, costs: Costs) -> list[tuple[Cost, int]]:
    """The pieces of a stage, or of a rank, and how many of each."""
    ends = [(costs.embedding, 1)] * part.first + [(costs.head, 1)] * part.last
    return [*((cost, times) for cost, times in zip(costs.layers, part.layers, strict=True) if times), *ends]


def weights_of(
    model: Model, stages: Sequence[Stage], kinds: Sequence[tuple[int, bool]], tensor: Ints, expert: Ints
) -> list[Weights]:
    """Weights of each stage."""
    layers = [of_kind(model, is_mixture, tensor, expert) for _, is_mixture in kinds]
    found = []
    for stage in stages:
        pieces = [weights * count for weights, count in zip(layers, stage.layers, strict=True) if count]
        if stage.first:
            pieces.append(of_embedding(model, tensor))
        if stage.last:
            pieces.append(of_head(model, tensor, stage.first))
        found.append(sum(pieces, Weights()))
    return found
