"""What many layouts of a job take at least, and what memory they need: one pass through the formulas of `predict`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.parallel.config import Schedule
from phalanx.parallel.pipeline.schedules import placement_of
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.memory.bound import memory_bound
from phalanx.plan.operations import Passes, local_of
from phalanx.plan.overheads import step_overheads, with_residual
from phalanx.plan.pipeline.bounds import StagePasses, lower_bound
from phalanx.plan.stages import (
    Weights,
    data_exchange,
    layer_costs,
    of_embedding,
    of_head,
    of_kind,
    send_s,
    stage_bounds,
)
from phalanx.plan.types import Floats, Ints, Job, Model, Strategy, distinct

Array = NDArray[np.float64]

_AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert", "micro_batch", "chunks")
_OF_LAYERS = ("context", "tensor", "expert", "micro_batch")
"""What the cost of a layer depends on; on `shard` too where weights are split."""
_NEARLY = 1 - 1e-9  # sums in another order differ in the last digits; a bound stays below


@dataclass(frozen=True, eq=False)
class Scores:
    """Of many layouts. `step_s`: never more than `predict` says."""

    step_s: Array
    job: Job
    strategy: Strategy

    @property
    def memory_bytes(self) -> Array:
        """Of the fullest rank, as `memory_bound` says; worked out when it is asked for."""
        return memory_bound(self.job, self.strategy)


def score(job: Job, strategy: Strategy, cluster: Cluster) -> Scores:
    """Bounds of all layouts of `strategy`, whose numbers are arrays.

    A pipeline's time is bounded from below (`phalanx.plan.pipeline.bounds`); so are exchanges of data-parallel ranks
    that overlap. All else is as in `predict`, for the smallest stages.
    """
    values = np.broadcast_arrays(*(np.atleast_1d(getattr(strategy, axis)) for axis in _AXES))
    axes: dict[str, Any] = dict(zip(_AXES, values, strict=True))
    strategy, job = replace(strategy, **axes), with_residual(job, cluster)
    # Costs of the few different layers that there are, and which of them each layout has.
    names = (*_OF_LAYERS, "shard") if strategy.zero == 3 else _OF_LAYERS
    columns = [getattr(strategy, name) for name in names]
    some, which = distinct(*columns)
    axes = {name: column[some] for name, column in zip(names, columns, strict=True)}
    pieces = layer_costs(job, replace(strategy, **axes), cluster)
    held = _held(job, strategy, pieces.kinds)
    # Seconds of a micro-batch in a layer of each kind, the embedding and the head, by layout.
    layers = [_chosen(cost.total, which) for cost in pieces.layers]
    embedding, head = _chosen(pieces.embedding.total, which), _chosen(pieces.head.total, which)
    first, last = _sum(layers, held.first) + embedding, _sum(layers, held.last) + head
    middle = _sum(layers, held.middle)
    micro_batches = strategy.micro_batches(job.global_batch)
    sent = send_s(job, strategy, cluster, local_of(job, strategy))
    chunks = np.where(strategy.pipeline > 1, strategy.chunks, 1)
    split = strategy.schedule in ("interleaved_zero_bubble", "zbv")
    span = lower_bound(
        strategy.schedule,
        strategy.pipeline,
        chunks,
        micro_batches,
        _as_stage(middle, split),
        _as_stage(first, split),
        _as_stage(last, split),
        sent,
        blocking=not job.software.pipeline_overlap,
    )
    # `first` and `last` each contain the layers, so `middle`, which is the layers alone, goes once.
    alone = micro_batches * (first.total + last.total - middle.total)
    through, busiest = _through_ranks(held, layers, embedding, head, micro_batches, sent, split)
    computing = np.where(strategy.pipeline > 1, busiest, alone)
    # Two bounds from below: the paths through the schedule, and the busiest rank. The larger one is nearer.
    span = np.where(strategy.pipeline > 1, np.maximum(span, through), alone)
    chunk = _weights(job.model, strategy, pieces.kinds, held.least)
    ends = np.maximum(embedding.backward, head.backward)
    backward = np.where(
        strategy.pipeline > 1, _sum(layers, held.most).backward + ends, (first + last).backward - middle.backward
    )
    last_chunk_s: Floats = np.inf
    if strategy.schedule.startswith("interleaved"):
        # The first pass of the last chunk begins on the first rank by then: its ranks run all of a round through one
        # chunk after the other, and before it forward passes only.
        turn = micro_batches // np.maximum(micro_batches // strategy.pipeline, 1)
        forward = _sum(layers, held.most).forward + embedding.forward
        last_chunk_s = (strategy.chunks - 1) * np.maximum(turn, strategy.pipeline) * (forward + sent)
    data = _data(job, strategy, cluster, chunk, chunks, backward, last_chunk_s)
    # Not the weights of as many stages from between: with two ranks, each has an end, which may have fewer layers.
    fullest = Weights(
        np.maximum.reduce([_weights(job.model, strategy, pieces.kinds, rank.own).total for rank in held.ranks])
    )
    rest = step_overheads(job, strategy, cluster, fullest, computing, span + data)
    step = (span + data + sum(rest.values())) / job.added.efficiency * _NEARLY
    return Scores(np.broadcast_to(step, np.shape(strategy.pipeline)), job, strategy)


@dataclass(frozen=True, eq=False)
class _Rank:
    """A pipeline rank of every layout."""

    behind: Ints  # stages that a micro-batch goes through before it comes here first
    before: Ints  # layers of each kind in those, kinds last
    own: Ints  # layers of each kind on the rank, kinds last
    has_head: Ints  # whether the loss head is here


@dataclass(frozen=True, eq=False)
class _Held:
    """Layers of each kind by layout, kinds last."""

    first: Ints
    middle: Ints  # the fewest of the stages between the first and the last
    last: Ints
    # That any stage has.
    least: Ints
    most: Ints
    ranks: Sequence[_Rank]  # of all that hold equally many the last, as most comes before it


def _held(job: Job, strategy: Strategy, kinds: tuple[tuple[int, bool], ...]) -> _Held:
    ranks, chunks = np.asarray(strategy.pipeline), np.where(strategy.pipeline > 1, strategy.chunks, 1)
    first, which = distinct(ranks, chunks)
    cuts = [_cut(job, strategy.schedule, int(ranks[at]), int(chunks[at]), kinds) for at in first]
    most = max(len(cut.ranks) for cut in cuts)
    columns = zip(*([*cut.ranks, *[cut.ranks[-1]] * (most - len(cut.ranks))] for cut in cuts), strict=True)
    return _Held(
        first=np.array([cut.first for cut in cuts])[which],
        middle=np.array([cut.middle for cut in cuts])[which],
        last=np.array([cut.last for cut in cuts])[which],
        least=np.array([cut.least for cut in cuts])[which],
        most=np.array([cut.most for cut in cuts])[which],
        ranks=[_Rank(*(np.array(column)[which] for column in zip(*rank, strict=True))) for rank in columns],
    )


class _Cut(NamedTuple):
    """Layers of each kind at the ends of one model, at least between, and in any; each different rank, as `_Rank`."""

    first: Ints
    middle: Ints
    last: Ints
    least: Ints
    most: Ints
    ranks: Sequence[tuple[int, Ints, Ints, bool]]


@lru_cache(maxsize=4096)  # every group of a search has the same cuts
def _cut(job: Job, schedule: Schedule, ranks: int, chunks: int, kinds: tuple[tuple[int, bool], ...]) -> _Cut:
    model, stages = job.model, ranks * chunks
    if stages > model.layers:
        none = np.zeros(len(kinds), np.int64)
        return _Cut(none, none, none, none, none, [(0, none, none, False)])
    bounds = stage_bounds(model, job.sequence, stages, job.software.even_stages)
    kind_of = np.array([kinds.index((model.window_of(n), model.is_mixture(n))) for n in range(model.layers)])
    counts = np.array(
        [
            [np.count_nonzero(kind_of[begin:end] == kind) for kind in range(len(kinds))]
            for begin, end in itertools.pairwise(bounds)
        ]
    )
    between = counts[1:-1] if stages > 2 else counts
    ranked = _different_ranks(counts, schedule, ranks)
    return _Cut(counts[0], between.min(axis=0), counts[-1], counts.min(axis=0), counts.max(axis=0), ranked)


def _different_ranks(counts: Ints, schedule: Schedule, ranks: int) -> list[tuple[int, Ints, Ints, bool]]:
    """Of ranks that hold the same the last one; stages come to the ranks in order first, whatever the placement."""
    stages = len(counts)
    placement = placement_of(schedule, ranks, stages // ranks) if stages > 1 else None
    place = np.array([placement.rank_of(stage) if placement else 0 for stage in range(stages)])
    before = np.cumsum(counts[:ranks], axis=0) - counts[:ranks]
    own = np.array([counts[place == rank].sum(axis=0) for rank in range(ranks)])
    same = {(*own[rank], rank == 0, rank == place[-1]): rank for rank in range(ranks)}
    return [(rank, before[rank], own[rank], bool(rank == place[-1])) for rank in same.values()]


def _sum(layers: Sequence[Passes], counts: Ints) -> Passes:
    return sum((cost * counts[:, kind] for kind, cost in enumerate(layers)), Passes())


def _through_ranks(
    held: _Held,
    layers: Sequence[Passes],
    embedding: Passes,
    head: Passes,
    micro_batches: Ints,
    sent: Floats,
    split: bool,
) -> tuple[Floats, Floats]:
    """Seconds of a step at least, as one rank has all its work to do: and of the most work that a rank has.

    The first micro-batch has to come to it, and its last gradient goes back through as many stages; where weights'
    gradients are put off, something else may be last. Holds however unequal stages are.
    """
    longest, busiest = np.zeros(np.shape(micro_batches)), np.zeros(np.shape(micro_batches))
    for rank in held.ranks:
        inner, first = rank.behind > 0, rank.behind == 0
        trip = _sum(layers, rank.before) + embedding * inner
        own = micro_batches * (_sum(layers, rank.own) + embedding * first + head * rank.has_head).total
        ways = trip.forward + rank.behind * sent
        back = 0.0 if split else trip.backward + rank.behind * sent
        longest, busiest = np.maximum(longest, ways + own + back), np.maximum(busiest, own)
    return longest, busiest


def _chosen(passes: Passes, which: Ints) -> Passes:
    count = int(which.max()) + 1

    def of(value: Floats) -> Floats:
        return np.broadcast_to(np.asarray(value, np.float64), (count,))[which]

    return Passes(of(passes.forward), of(passes.again), of(passes.backward_input), of(passes.backward_weight))


def _as_stage(passes: Passes, split: bool) -> StagePasses:
    if split:
        return StagePasses(passes.forward, passes.again + passes.backward_input, passes.backward_weight)
    return StagePasses(passes.forward, passes.backward)


def _weights(model: Model, strategy: Strategy, kinds: tuple[tuple[int, bool], ...], counts: Ints) -> Weights:
    each = [of_kind(model, is_mixture, strategy.tensor, strategy.expert) for _, is_mixture in kinds]
    total = sum((weights * counts[:, kind] for kind, weights in enumerate(each)), Weights())
    alone = strategy.pipeline == 1
    ends = of_embedding(model, strategy.tensor) + of_head(model, strategy.tensor, True)
    held: Weights = total + ends * alone
    return held


def _data(
    job: Job,
    strategy: Strategy,
    cluster: Cluster,
    chunk: Weights,
    chunks: Ints,
    backward_s: Floats,
    last_chunk_s: Floats,
) -> Floats:
    """What the data-parallel exchange adds at least, for chunks of that many weights.

    The pipeline rank that is done last has nobody to wait for, so that all of its exchange counts.

    Args:
        backward_s: of one micro-batch through a chunk, at most.
        last_chunk_s: when the first rank needs the weights of its last chunk, at most.
    """
    both = data_exchange(job, strategy, cluster, chunk.dense)
    if not job.software.data_overlap:
        return chunks * (both.reduce_s + both.gather_s)
    num_bytes = chunk.total * job.software.reduce_bytes
    buckets = np.maximum(1, np.round(num_bytes / strategy.bucket_bytes)) if strategy.bucket_bytes else 1.0
    lead = 0.0 if job.software.first_gather_hidden else both.gather_s / buckets
    # The last chunk to be reduced begins with its last backward pass, and its last bucket after it.
    alone = np.maximum(both.reduce_s / buckets, both.reduce_s - backward_s * (1 - 1 / buckets)) + lead
    covered = backward_s if strategy.bucket_bytes else 0.0
    tail = np.maximum(0.0, both.reduce_s - covered)
    late = 0.0 if job.software.first_gather_hidden else (chunks - 1) * both.gather_s - last_chunk_s
    return np.where(strategy.pipeline == 1, alone, np.maximum(tail, late))
