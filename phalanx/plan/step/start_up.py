"""From the start command to the first step."""

from __future__ import annotations

from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.step.weights import Weights
from phalanx.plan.types import Floats, Job, Strategy


def start_up_s(job: Job, strategy: Strategy, cluster: Cluster, weights: Weights) -> dict[str, Floats]:
    """Seconds by path: starting processes, making groups, reading weights and optimizer state of a checkpoint.

    One rank of each group that holds the same state reads it (MegaScale, section 4); all do so at once.
    """
    state_bytes = weights.total * (job.software.master_bytes + job.software.weight_bytes + 2 * job.moment_bytes)
    readers = strategy.tensor * strategy.pipeline * (strategy.shard if strategy.zero else 1)
    return {
        "start_up/processes": cluster.value("start_up.process_s"),
        "start_up/groups": cluster.value("start_up.groups_s"),
        "start_up/restore": state_bytes
        / (strategy.shard if strategy.zero else 1)
        * readers
        / cluster.value("start_up.read_bytes_per_s"),
    }
