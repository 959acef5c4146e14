"""What of the data-parallel exchange is exposed in a step, and what is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.plan.communication.data import Exchange, exchange
from phalanx.plan.communication.tail import gather_lead_s, reduce_tail_s
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.step.timeline import Timeline
from phalanx.plan.step.weights import Weights
from phalanx.plan.types import Job, Strategy


@dataclass(frozen=True)
class DataTime:
    """Seconds of one pipeline rank.

    Attributes:
        lead_s: its first forward passes wait for weights.
        tail_s: its gradients are still being reduced after its last backward pass.
        hidden_s: exchanged while it computed.
    """

    lead_s: float
    tail_s: float
    hidden_s: float


def data_time(
    job: Job,
    strategy: Strategy,
    line: Timeline,
    rank: int,
    weights: Sequence[Weights],
    exchanges: Sequence[Exchange],
) -> DataTime:
    """Of pipeline rank `rank`.

    Args:
        weights, exchanges: of every stage.
    """
    stages = line.of_rank(rank)
    reduce_s = [float(exchanges[stage.index].reduce_s) for stage in stages]
    gather_s = [float(exchanges[stage.index].gather_s) for stage in stages]
    early = float(line.time.span_s - line.time.end_s[rank])  # others still compute
    if not job.software.data_overlap:
        tail = max(sum(reduce_s) - early, 0.0)
        return DataTime(sum(gather_s), tail, sum(reduce_s) - tail)
    backward = [float(line.passes[stage.index].backward) for stage in stages]
    num_bytes = max(weights[stage.index].total for stage in stages) * job.software.reduce_bytes
    buckets = max(1, round(num_bytes / strategy.bucket_bytes)) if strategy.bucket_bytes else 1
    after = reduce_tail_s(reduce_s, line.time.last_backward_end_s[rank].tolist(), backward, buckets)
    tail = max(after - early, 0.0)
    needed = line.time.first_forward_begin_s[rank].tolist()
    first = [gather_s[0] / buckets, *gather_s[1:]]  # the first layers are needed first
    lead = 0.0 if job.software.first_gather_hidden else gather_lead_s(first, needed)
    return DataTime(lead, tail, max(sum(reduce_s) + sum(gather_s) - lead - tail, 0.0))


def both(job: Job, strategy: Strategy, cluster: Cluster, weights: Weights) -> Exchange:
    """Dense weights are shared by all data-parallel ranks, experts by those that hold the same ones."""
    dense = exchange(job, strategy, cluster, weights.dense)
    if not weights.experts:
        return dense
    ranks = strategy.data * strategy.context // strategy.expert
    experts = exchange(job, strategy, cluster, weights.experts, ranks)
    return Exchange(dense.reduce_s + experts.reduce_s, dense.gather_s + experts.gather_s)
