"""How far a part of a step's time can be trusted: as far as the weakest number that it rests on."""

from __future__ import annotations

from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.types import Job, Mark, weakest

_PRODUCTS = frozenset(("attention_projections", "mlp", "merged_in", "merged_out", "head", "experts", "router"))
_NUMBERS = {
    "compute/host": ("device", "host_launch_s"),
    "compute/gaps": ("device", "kernel_gap_s"),
    "context": ("cluster", "network.nic_bytes_per_s"),
    "pipeline/sends": ("cluster", "network.nic_bytes_per_s"),
    "data": ("cluster", "network.achieved_ratio"),
    "loader": ("cluster", "loader.step_s"),
    "stragglers": ("cluster", "stragglers.rank_sigma_ratio"),
    "sync": ("cluster", "network.latency_s"),
}


def mark_of(path: str, job: Job, cluster: Cluster) -> tuple[Mark, str]:
    """The mark of a part and the source of its weakest number."""
    mark, source = _number(path, job, cluster)
    return weakest([mark]), source


def _number(path: str, job: Job, cluster: Cluster) -> tuple[Mark, str]:
    device, top = cluster.device, path.split("/")[0]
    for prefix in (path, top):
        if prefix in _NUMBERS:
            where, key = _NUMBERS[prefix]
            if key.startswith("network.") and cluster.hosts == 1:
                return cluster.mark_of("all_reduce")
            return (device if where == "device" else cluster).mark_of(key)
    if top == "tensor":
        return cluster.mark_of("all_gather")
    if top == "expert":
        return cluster.mark_of("all_to_all")
    if path == "compute/attention" and job.software.fused_attention:
        return device.mark_of("attention", job.precision)
    if path.removeprefix("compute/") in _PRODUCTS or path in ("compute/attention", "pipeline/bubble"):
        return device.mark_of("gemm", job.precision)
    return device.mark_of("stream")
