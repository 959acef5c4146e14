"""Waiting for the slowest rank of a synchronous step on a cluster."""

from __future__ import annotations

from phalanx.plan.constant.stragglers import Spread, slowest
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.types import Floats, Strategy


def spread_of(cluster: Cluster) -> Spread:
    """How unequal the ranks of `cluster` are, from run to run the same; what varies from pass to pass is not known."""
    return Spread(
        lasting_sigma=cluster.value("stragglers.rank_sigma_ratio"),
        slow_share=cluster.value("stragglers.slow_host_share_ratio"),
        slow_excess=cluster.value("stragglers.slow_host_excess_ratio"),
    )


def waiting_s(strategy: Strategy, cluster: Cluster, computing_s: Floats) -> Floats:
    """Seconds that the slowest of all ranks is expected to take longer for `computing_s` than the mean one."""
    ranks_per_host = min(cluster.devices_per_host, cluster.devices)
    return computing_s * (slowest(spread_of(cluster), strategy.world_size, ranks_per_host).mean - 1)
