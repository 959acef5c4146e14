"""What a step costs whatever its number of micro-batches: optimizer, norms, small messages, loader, slow ranks."""

from __future__ import annotations

from phalanx.plan.constant.optimizer import cast_s, clear_s, model_ranks, norm_s, update_s
from phalanx.plan.constant.waiting import waiting_s
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.step.weights import Weights
from phalanx.plan.types import Floats, Job, Strategy
from phalanx.plan.work.local import weight_bytes

_SCALAR_BYTES = 8
IN_STEP = "loader.in_step_s"
"""Of a cluster: what making a batch before its step takes, where a program does so."""


def constants(
    job: Job, strategy: Strategy, cluster: Cluster, weights: Weights, computing_s: Floats, step_s: Floats
) -> dict[str, Floats]:
    """Exposed seconds by path.

    Args:
        weights: that the rank holds.
        computing_s: of the step's passes, which slow ranks make longer.
        step_s: of all passes and exchanges.
    """
    device = cluster.device
    found = {
        "optimizer/update": update_s(job, strategy, device, weights.total),
        "optimizer/norm": norm_s(job, strategy, device, weights.total),
        "optimizer/clear": clear_s(job, device, weights.total),
        "optimizer/casts": cast_s(job, device, weights.total, weight_bytes(job, strategy)),
        "sync": sync_s(strategy, cluster),
        "data/tied_embedding": tied_embedding_s(job, strategy, cluster),
        "stragglers": waiting_s(strategy, cluster, computing_s),
    }
    return found | {"loader": loader_s(job, strategy, cluster, step_s + sum(found.values()))}


def sync_s(strategy: Strategy, cluster: Cluster) -> Floats:
    """The step's small messages."""
    over_model = cluster.collective_s("all_reduce", _SCALAR_BYTES, model_ranks(strategy), strategy.data)
    over_data = cluster.collective_s("all_reduce", _SCALAR_BYTES, strategy.data, strategy.tensor * strategy.context)
    return over_model + over_data


def tied_embedding_s(job: Job, strategy: Strategy, cluster: Cluster) -> Floats:
    """The first and the last stage add their gradients of one embedding (arXiv 1909.08053)."""
    if not job.model.tie_embeddings:
        return 0.0
    rows = job.model.vocab_rows / strategy.tensor
    num_bytes = rows * job.model.hidden * job.software.reduce_bytes
    stride = (strategy.pipeline - 1) * strategy.data * strategy.context * strategy.tensor
    pair = 1 + (strategy.pipeline > 1)
    return cluster.collective_s("all_reduce", num_bytes, pair, stride + (strategy.pipeline == 1))


def loader_s(job: Job, strategy: Strategy, cluster: Cluster, step_s: Floats) -> Floats:
    """Making the next batch and copying it to the devices: before the step, or beside it; then only what it takes
    longer than all else counts.

    Args:
        step_s: of all else.
    """
    if not job.software.loader_hidden and IN_STEP in cluster.numbers:
        return cluster.value(IN_STEP)
    tokens = job.tokens / (strategy.data * strategy.context)
    seconds = cluster.value("loader.step_s") + tokens * 8 / cluster.value("loader.copy_bytes_per_s")
    if not job.software.loader_hidden:
        return seconds
    return (seconds - step_s) * (seconds > step_s)
