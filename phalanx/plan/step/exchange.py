"""What of the data-parallel exchange is exposed in a step, and what is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.plan.communication.data import Exchange, exchange
from phalanx.plan.communication.tail import gather_lead_s, reduce_tail_s
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.pipeline.costs import Array
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
    job: Job, strategy: Strategy, line: Timeline, weights: Sequence[Weights], exchanges: Sequence[Exchange]
) -> DataTime:
    """Of the pipeline rank that is done with it last.

    Args:
        weights, exchanges: of every different stage.
    """
    places = line.stages.places
    reduce_s = np.array([float(each.reduce_s) for each in exchanges])[places]
    gather_s = np.array([float(each.gather_s) for each in exchanges])[places]
    reduced_s, gathered_s = reduce_s.sum(axis=0), gather_s.sum(axis=0)
    lead_s, after_s = gathered_s, reduced_s
    if job.software.data_overlap:
        lead_s, after_s = _not_covered(job, strategy, line, weights, reduce_s, gather_s)
    early_s = line.time.span_s - line.time.end_s  # others still compute
    tail_s = np.maximum(after_s - early_s, 0.0)
    rank = int((lead_s + tail_s).argmax())
    lead, tail = float(lead_s[rank]), float(tail_s[rank])
    if not job.software.data_overlap:
        return DataTime(lead, tail, float(reduced_s[rank]) - tail)
    return DataTime(lead, tail, max(float(reduced_s[rank] + gathered_s[rank]) - lead - tail, 0.0))


def _not_covered(
    job: Job, strategy: Strategy, line: Timeline, weights: Sequence[Weights], reduce_s: Array, gather_s: Array
) -> tuple[Array, Array]:
    """What first forward passes wait for weights, and how long gradients are reduced after the end, by rank.

    Args:
        reduce_s, gather_s: by chunk and rank.
    """
    places, time = line.stages.places, line.time
    buckets = np.ones(places.shape[1])
    if strategy.bucket_bytes:
        num_bytes = np.array([each.total for each in weights])[places].max(axis=0) * job.software.reduce_bytes
        buckets = np.maximum(np.rint(num_bytes / strategy.bucket_bytes), 1.0)
    backward_s = np.array([float(each.backward) for each in line.passes])[places]
    after_s = reduce_tail_s(reduce_s, time.last_backward_end_s.T, backward_s, buckets)
    if job.software.first_gather_hidden:
        return np.zeros_like(after_s), after_s
    gather_s[0] /= buckets  # the first layers are needed first
    return gather_lead_s(gather_s, time.first_forward_begin_s.T), after_s


def both(job: Job, strategy: Strategy, cluster: Cluster, weights: Weights) -> Exchange:
    """Dense weights are shared by all data-parallel ranks, experts by those that hold the same ones."""
    dense = exchange(job, strategy, cluster, weights.dense)
    if not weights.experts:
        return dense
    ranks = strategy.data * strategy.context // strategy.expert
    experts = exchange(job, strategy, cluster, weights.experts, ranks)
    return Exchange(dense.reduce_s + experts.reduce_s, dense.gather_s + experts.gather_s)
