"""What pipeline stages send each other."""

from __future__ import annotations

from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.types import Floats, Job, Strategy
from phalanx.plan.work.local import Local

_RESTART_LAUNCHES = 25
"""Host work, in launches, from a send that the host waited for to the next kernel (assumed): Megatron-LM synchronises
device and host after each exchange between stages, so that the device idles while the schedule goes on in Python."""


def send_s(job: Job, strategy: Strategy, cluster: Cluster, local: Local) -> Floats:
    """Seconds in which one micro-batch's activations, or their gradients, go from a stage to the next.

    With sequence parallelism every rank sends the rows it keeps. Without, all tensor-parallel ranks hold the same rows:
    each sends all of them, or its part, and the receivers gather (arXiv 2104.04473, section 4.1, "scatter/gather").
    """
    restart = 0.0
    if not local.software.pipeline_overlap:
        restart = _RESTART_LAUNCHES * cluster.device.host_launch_s * local.software.host_factor
    return restart + _transfer_s(job, strategy, cluster, local)


def _transfer_s(job: Job, strategy: Strategy, cluster: Cluster, local: Local) -> Floats:
    stride = strategy.data * strategy.context * strategy.tensor
    whole = local.tokens * job.model.hidden * local.software.sent_bytes
    if strategy.sequence_parallel:
        return cluster.send_s(whole / strategy.tensor, stride)
    if not local.software.split_sends:
        return cluster.send_s(whole, stride)
    gather = cluster.collective_s("all_gather", whole, strategy.tensor)
    return cluster.send_s(whole / strategy.tensor, stride) + gather
