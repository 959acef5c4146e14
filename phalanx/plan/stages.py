"""What each pipeline stage computes: which layers it holds, what a layer costs on a rank, and how many weights that is.

`layer_costs` gives each layer and both ends: kernels, exchanges, and the host that launches them; `stages_of` shares
the layers out, and `stage_passes` adds up what one micro-batch takes on a stage. Once per step the data-parallel ranks
exchange gradients, and weights where they are split (`data_exchange`); pipeline stages send to each other (`send_s`).
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
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.layer import (
    Covered,
    RowExchange,
    context_exchange,
    embedding,
    expert_exchange,
    head,
    layer,
    row_exchange,
    slower,
    tensor_exchange,
    zero3_exchange,
)
from phalanx.plan.operations import Local, Operation, Passes, Timed, local_of, timed
from phalanx.plan.types import Floats, Ints, Job, Model, Strategy, functions, layer_kinds

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Stage:
    """What one stage holds. `layers`: how many of each kind, as `Costs.kinds` orders them."""

    index: int
    rank: int
    chunk: int
    layers: tuple[int, ...]
    first: bool
    last: bool


@dataclass(frozen=True)
class RankShare:
    """What one pipeline rank has of the model."""

    layers: tuple[Ints, ...]
    first: bool  # it has the embedding
    last: bool  # it has the loss head
    at_end: bool  # it is the last of the pipeline


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


# A search asks for the same stages with many ways to share state, which do not matter here.
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
    return cut(tuple(pieces), stages)


def _flops(model: Model, sequence: int, layer: int) -> float:
    """Forward and backward FLOPs of one token in `layer`, as `phalanx.parallel.pipeline.split` counts them."""
    # Backward computes two products for each of forward's: 3 times in all.
    return 3 * (
        2.0 * layer_weights(model, layer, active=True)
        + 4.0 * model.heads * model.head_dim * mean_keys(sequence, model.window_of(layer) or None)
    )


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
    """Seconds of the passes over one micro-batch, by path."""

    exposed: Mapping[str, Passes]  # parts that follow each other
    hidden: Mapping[str, Passes]  # what runs beside them

    @cached_property
    def total(self) -> Passes:
        """All exposed parts."""
        return Passes.sum(self.exposed.values())


@dataclass(frozen=True)
class Costs:
    """Costs of all pieces of a model: one for each kind of layer, and the ends."""

    local: Local
    kinds: tuple[tuple[int, bool], ...]  # of the layers: keys seen and whether the layer is a mixture
    layers: tuple[Cost, ...]
    embedding: Cost
    head: Cost


Known: TypeAlias = MutableMapping[Hashable, Costs]
"""Costs that were worked out for one job on one cluster, by what they depend on."""


def known_costs(job: Job, strategy: Strategy, cluster: Cluster, known: Known) -> Costs:
    """As `layer_costs`, of a strategy with plain numbers; each is worked out once."""
    # All that the costs of a layer depend on. How many ranks share state matters only where ZeRO 3 gathers weights in
    # every pass.
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
    # Last, since its exchanges hide beside all that the layer does, waiting for the others included.
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
    # Between two kernels that wait for each other the device idles for a moment, however far ahead the host is.
    exposed["compute/gaps"] = (kernels.launches + calls) * cluster.device.kernel_gap_s
    device = Passes.sum(exposed.values())
    launching_s = cluster.device.launching_s(compiled=job.software.compiled)
    host = (kernels.launches + calls) * (launching_s * job.software.host_factor)
    # A GPU waits for the host only where that takes longer than all kernels; on a CPU both are the same cores.
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
    """Elements on one tensor-parallel rank."""

    dense: Floats = 0.0  # shared by all data-parallel ranks
    experts: Floats = 0.0  # of the experts that the rank holds

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
    # Layers of one kind have the same matrices; windows change none.
    layer = next(n for n in range(model.layers) if model.is_mixture(n) == is_mixture)
    norms = (1 if model.block == "parallel" else 2) * model.hidden * (2 if model.norm == "layer" else 1)
    # Biases of split outputs are split with them; norms, and biases of what is summed over ranks, are whole on each.
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


@dataclass(frozen=True)
class DataExchange:
    """Seconds of what a rank exchanges for some of its weights."""

    reduce_s: Floats  # summing their gradients
    gather_s: Floats  # collecting the weights that other ranks updated; 0 where every rank updates all


def data_exchange(
    job: Job, strategy: Strategy, cluster: Cluster, weights: Floats, ranks: Ints | None = None
) -> DataExchange:
    """Exchanges for `weights` elements of a rank, as one message each way.

    Gradients are summed over data-parallel and context ranks. Where state is split (ZeRO 1 and up) they are scattered
    over the ranks that split it and all-reduced between the copies; updated weights are gathered.

    Args:
        ranks: that share these weights; None: all data-parallel and context ranks (experts are shared by fewer).
    """
    # Ranks of a tensor-parallel group are neighbours, so those that share its weights lie that far apart.
    stride = strategy.tensor
    sharded = strategy.shard * strategy.context
    copies = strategy.replicate
    if ranks is not None:
        # Of experts, fewer ranks hold the same ones: the copies are counted first.
        f = functions(sharded, copies, ranks)
        copies_left = f.least(copies, ranks)
        sharded, copies = f.largest(ranks // copies_left, 1), copies_left
    num_bytes = weights * job.software.reduce_bytes
    if strategy.zero == 0:
        # Zero times the weights, not 0, so that it has the shape of an array of layouts.
        return DataExchange(cluster.collective_s("all_reduce", num_bytes, sharded * copies, stride), 0.0 * weights)
    between: Floats = 0.0
    # Copies exchange only the shard that each rank has reduced. Arrays are worked out in any case: for one copy it is 0
    # s.
    if not (isinstance(copies, int) and copies == 1):
        between = cluster.collective_s("all_reduce", num_bytes / sharded, copies, stride * sharded)
    if strategy.zero == 3:  # all else goes in every pass
        return DataExchange(between, 0.0 * weights)
    scatter = cluster.collective_s("reduce_scatter", num_bytes, sharded, stride)
    gathered = weights * job.software.gather_bytes
    gather = cluster.collective_s("all_gather", gathered, sharded, stride)
    return DataExchange(scatter + between, gather)


def reduce_tail_s(reduce_s: Array, ready_s: Array, backward_s: Array, buckets: Array) -> Array:
    """Seconds after the end of each rank's computing until the gradients of all its chunks are reduced.

    Chunks are reduced one after another in the order in which their last backward passes end. A chunk in several
    buckets begins while its last backward pass runs; its last bucket waits for the end.
    """
    ready_s, reduce_s, backward_s = _in_order(ready_s, reduce_s, backward_s)
    # All buckets but the last are ready at equal distances during the last backward pass.
    begin_s = ready_s - backward_s * (1 - 1 / buckets)
    last_s = ready_s + reduce_s / buckets
    free_s = np.zeros(len(buckets))
    for begin, seconds, last in zip(begin_s, reduce_s, last_s, strict=True):
        free_s = np.maximum(np.maximum(free_s, begin) + seconds, last)
    tail_s: Array = np.maximum(free_s - ready_s[-1], 0.0)
    return tail_s


def gather_lead_s(gather_s: Array, needed_s: Array) -> Array:
    """Seconds by which gathering weights, chunk after chunk from the start of the step, delays each rank's forwards."""
    needed_s, gather_s = _in_order(needed_s, gather_s)
    late_s: Array = (gather_s.cumsum(axis=0) - needed_s).max(axis=0, initial=0.0)
    return late_s


def _in_order(when_s: Array, *others: Array) -> tuple[Array, ...]:
    """All with the chunks of each rank in the order of `when_s`."""
    if len(when_s) == 1:
        return when_s, *others
    order, ranks = when_s.argsort(axis=0, kind="stable"), np.arange(when_s.shape[1])
    return tuple(each[order, ranks] for each in (when_s, *others))


_RESTART_LAUNCHES = 25
"""Host work, in launches, from a send that the host waited for to the next kernel (assumed): Megatron-LM synchronises
device and host after each exchange between stages, so that the device idles while the schedule goes on in Python."""


def send_s(job: Job, strategy: Strategy, cluster: Cluster, local: Local) -> Floats:
    """Seconds in which one micro-batch's activations, or their gradients, go from a stage to the next.

    With sequence parallelism every rank sends the rows it keeps. Without, all tensor-parallel ranks hold the same rows:
    each sends all of them, or its part, and the receivers gather (arXiv 2104.04473, section 4.1, "scatter/gather").
    """
    # Where sends overlap they are posted ahead, and the host never waits for one.
    restart = 0.0
    if not local.software.pipeline_overlap:
        restart = _RESTART_LAUNCHES * cluster.device.host_launch_s * local.software.host_factor
    stride = strategy.data * strategy.context * strategy.tensor
    whole = local.tokens * job.model.hidden * local.software.sent_bytes
    if strategy.sequence_parallel:
        return restart + cluster.send_s(whole / strategy.tensor, stride)
    if not local.software.split_sends:
        return restart + cluster.send_s(whole, stride)
    gather = cluster.collective_s("all_gather", whole, strategy.tensor)
    return restart + (cluster.send_s(whole / strategy.tensor, stride) + gather)
