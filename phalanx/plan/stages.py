"""What each pipeline stage computes: which layers it holds, what a layer costs on a rank, and how many weights that is.

`layer_costs` gives each layer and both ends: kernels, exchanges, and the host that launches them; `stages_of` shares
the layers out, and `stage_passes` adds up what one micro-batch takes on a stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from phalanx.model.shapes import mean_keys
from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import placement_of
from phalanx.parallel.pipeline.split import cut
from phalanx.plan.communication import (
    Covered,
    RowExchange,
    context_exchange,
    expert_exchange,
    row_exchange,
    tensor_exchange,
    zero3_exchange,
)
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.formula import functions
from phalanx.plan.layer import embedding, head, layer, slower
from phalanx.plan.operations import Local, Operation, Passes, Timed, local_of, timed
from phalanx.plan.types import Floats, Ints, Job, Model, Strategy, layer_kinds


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
class RankShare:
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


def _share(chunks: Sequence[Stage], *, at_end: bool) -> RankShare:
    layers = tuple(map(sum, zip(*(stage.layers for stage in chunks), strict=True)))
    return RankShare(layers, any(stage.first for stage in chunks), any(stage.last for stage in chunks), at_end)


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
            # Most stages in the middle hold the same layers. What follows is done once for each different one.
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
    def shares(self) -> list[RankShare]:
        """What every pipeline rank has of the model."""
        columns = [[self.different[number] for number in numbers] for numbers in self.places.T]
        return [_share(chunks, at_end=rank == len(columns) - 1) for rank, chunks in enumerate(columns)]


def stages_of(job: Job, strategy: Strategy, kinds: Sequence[tuple[int, bool]]) -> Stages:
    """The stages of the pipeline, in the order of the model."""
    # A layout without a pipeline may still name chunks: they mean nothing on one rank.
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
    # A lookup is hardly any work, but the head is as much as several layers: the last stage gets fewer of them.
    pieces[0] += 2.0 * model.hidden
    pieces[-1] += 6.0 * model.vocab_rows * model.hidden
    return tuple(cut(pieces, stages))


def _flops(model: Model, sequence: int, layer: int) -> float:
    """Forward and backward FLOPs of one token in `layer`, as `phalanx.parallel.pipeline.split` counts them."""
    return 3 * (
        2.0 * layer_weights(model, layer, active=True)
        + _flops_per_key(model) * mean_keys(sequence, model.window_of(layer) or None)
    )


def _flops_per_key(model: Model) -> float:
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


def held_by(part: Stage | RankShare, costs: Costs) -> list[tuple[Cost, int]]:
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


@dataclass(frozen=True)
class Cost:
    """Seconds of the passes over one micro-batch, by path.

    Attributes:
        exposed: parts that follow each other.
        hidden: what runs beside them.
    """

    exposed: Mapping[str, Passes]
    hidden: Mapping[str, Passes]

    @cached_property
    def total(self) -> Passes:
        """All exposed parts."""
        return Passes.sum(self.exposed.values())


@dataclass(frozen=True)
class Costs:
    """Costs of all pieces of a model: one for each kind of layer, and the ends.

    Attributes:
        kinds: of the layers: keys seen and whether the layer is a mixture.
        layers: for each kind.
    """

    local: Local
    kinds: tuple[tuple[int, bool], ...]
    layers: tuple[Cost, ...]
    embedding: Cost
    head: Cost


Known: TypeAlias = MutableMapping[Hashable, Costs]
"""Costs that were worked out for one job on one cluster, by what they depend on."""


def known_costs(job: Job, strategy: Strategy, cluster: Cluster, known: Known) -> Costs:
    """As `layer_costs`, of a strategy with plain numbers; each is worked out once."""
    key = (
        *(strategy.context, strategy.tensor, strategy.expert, strategy.micro_batch, strategy.recompute),
        *(strategy.sequence_parallel, strategy.tensor_overlap, strategy.tensor_chunks, strategy.context_method),
        strategy.shard if strategy.zero == 3 else 0,
    )
    if key not in known:
        known[key] = layer_costs(job, strategy, cluster)
    return known[key]


def layer_costs(job: Job, strategy: Strategy, cluster: Cluster) -> Costs:
    """What the pieces of `job` cost on a rank of `strategy`."""
    local, kinds = local_of(job, strategy), layer_kinds(job.model)
    rows = row_exchange(job, strategy, cluster, local)
    return Costs(
        local=local,
        kinds=kinds,
        layers=tuple(_layer(job, strategy, cluster, local, rows, *kind) for kind in kinds),
        embedding=_end(job, strategy, cluster, embedding(local), rows.scatter_s, rows.gather_s),
        head=_end(job, strategy, cluster, head(local), rows.gather_s, rows.scatter_s),
    )


def _layer(
    job: Job,
    strategy: Strategy,
    cluster: Cluster,
    local: Local,
    rows: RowExchange,
    window: int,
    is_mixture: bool,
) -> Cost:
    kernels = _timed(job, strategy, cluster, slower(layer(local, window, is_mixture), job.added.kernels))
    exchanges = {
        "tensor": tensor_exchange(job, strategy, cluster, local, rows),
        "context": context_exchange(strategy, cluster, local, kernels.by_path.get("compute/attention", Passes())),
    }
    if is_mixture:
        exchanges["expert"] = expert_exchange(strategy, cluster, local)
    if strategy.zero == 3:
        computing = kernels.total + Passes.sum(each.exposed for each in exchanges.values())
        weights = of_kind(job.model, is_mixture, strategy.tensor, strategy.expert).total
        exchanges["data/weights"] = zero3_exchange(job, strategy, cluster, weights, computing)
    return _cost(job, cluster, kernels, exchanges)


def _end(
    job: Job,
    strategy: Strategy,
    cluster: Cluster,
    operations: Sequence[Operation],
    forward_s: Floats,
    backward_s: Floats,
) -> Cost:
    """Embedding or head: rows are summed over shares of the vocabulary, or gathered for the last product."""
    exchange = Covered(Passes(forward_s, 0.0, backward_s, 0.0), collectives=Passes(1, 0, 1, 0))
    return _cost(job, cluster, _timed(job, strategy, cluster, operations), {"tensor": exchange})


def _timed(job: Job, strategy: Strategy, cluster: Cluster, operations: Sequence[Operation]) -> Timed:
    return timed(operations, cluster.device, job.precision, strategy.recompute)


def _cost(job: Job, cluster: Cluster, kernels: Timed, exchanges: Mapping[str, Covered]) -> Cost:
    exposed = {**kernels.by_path, **{path: covered.exposed for path, covered in exchanges.items()}}
    hidden = {path: covered.hidden for path, covered in exchanges.items()}
    if cluster.device.kind == "cpu":  # the cores that would compute copy messages meanwhile
        exposed |= {path: covered.exposed + covered.hidden for path, covered in exchanges.items()}
        hidden = {}
    calls = Passes.sum(covered.collectives for covered in exchanges.values())
    exposed["compute/gaps"] = (kernels.launches + calls) * cluster.device.kernel_gap_s
    device = Passes.sum(exposed.values())
    launching_s = cluster.device.launching_s(compiled=job.software.compiled)
    host = (kernels.launches + calls) * (launching_s * job.software.host_factor)
    exposed["compute/host"] = host if cluster.device.kind == "cpu" else _not_covered(host, device)
    return Cost(exposed, hidden)


def _not_covered(host: Passes, device: Passes) -> Passes:
    """How long the device waits for the host that launches its kernels; both kinds of gradients are made in turns."""
    return Passes(
        _more(host.forward, device.forward),
        _more(host.again, device.again),
        _more(host.backward_input + host.backward_weight, device.backward_input + device.backward_weight),
        0.0,
    )


def _more(host_s: Floats, device_s: Floats) -> Floats:
    return functions(host_s, device_s).largest(host_s - device_s, 0.0)


@dataclass(frozen=True)
class Weights:
    """Elements on one tensor-parallel rank.

    Attributes:
        dense: shared by all data-parallel ranks.
        experts: of the experts that the rank holds.
    """

    dense: Floats = 0.0
    experts: Floats = 0.0

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.dense + other.dense, self.experts + other.experts)

    def __mul__(self, times: Floats) -> Weights:
        return Weights(self.dense * times, self.experts * times)

    @property
    def total(self) -> Floats:
        """All of them."""
        return self.dense + self.experts


def layer_weights(model: Model, layer: int, active: bool = False) -> int:
    """Elements of the matrices of one layer; of those that one token meets where `active`."""
    attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    matrices = 3 if model.gated else 2
    if not model.is_mixture(layer):
        return attention + matrices * model.hidden * model.dense_mlp_width
    count = (model.experts_per_token if active else model.experts) + model.shared_experts
    return attention + model.hidden * model.experts + count * matrices * model.hidden * model.mlp_width


def of_kind(model: Model, is_mixture: bool, tensor: Ints, expert: Ints) -> Weights:
    """Weights of one layer: matrices are split over `tensor` ranks, experts over `expert` ranks too."""
    layer = next(n for n in range(model.layers) if model.is_mixture(n) == is_mixture)
    norms = (1 if model.block == "parallel" else 2) * model.hidden * (2 if model.norm == "layer" else 1)
    biases = 0.0
    if model.bias != "none":
        biases += model.head_dim * (model.heads + 2 * model.kv_heads) / tensor
    if model.bias == "all" and not is_mixture:
        biases += 2 * model.hidden + model.dense_mlp_width / tensor
    matrices = layer_weights(model, layer)
    routed = 0
    if is_mixture:
        routed = model.experts * (3 if model.gated else 2) * model.hidden * model.mlp_width
    return Weights((matrices - routed) / tensor + norms + biases, routed / tensor / expert)


def of_embedding(model: Model, tensor: Ints) -> Weights:
    """Weights of the embedding, and of learned positions, which are not split."""
    positions = model.max_sequence * model.hidden if model.position == "learned" else 0
    return Weights(model.vocab_rows * model.hidden / tensor + positions)


def of_head(model: Model, tensor: Ints, alone: bool) -> Weights:
    """Weights of the last norm and of the head, which is the embedding where tied and on the same rank (`alone`)."""
    norm = model.hidden * (2 if model.norm == "layer" else 1)
    matrix = 0 if model.tie_embeddings and alone else model.vocab_rows * model.hidden / tensor
    return Weights(norm + matrix)
