"""What ZeRO-3 exchanges in every pass: weights before they are used, gradients once they are made."""

from __future__ import annotations

from phalanx.plan.communication.covered import Covered, beside
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.types import Floats, Job, Strategy
from phalanx.plan.work.operations import Passes


def sharded(job: Job, strategy: Strategy, cluster: Cluster, weights: Floats, computing: Passes) -> Covered:
    """The exchanges of one layer of `weights` elements per rank that computes for `computing` seconds.

    Weights are gathered for the forward and again for the backward pass, while the layer before computes; gradients are
    scattered while the next one does (arXiv 1910.02054, section 7.2), which slows that computing down.
    """
    if strategy.zero != 3:
        return Covered()
    ranks = strategy.shard * strategy.context
    gather = cluster.collective_s("all_gather", weights * job.software.gather_bytes, ranks, strategy.tensor)
    scatter = cluster.collective_s("reduce_scatter", weights * job.software.reduce_bytes, ranks, strategy.tensor)
    if not job.software.data_overlap:
        return Covered(Passes(gather, 0.0, gather + scatter, 0.0), collectives=Passes(1, 0, 2, 0))
    forward, backward = beside(gather, computing.forward), beside(gather + scatter, computing.backward)
    hidden = Passes(gather - forward, 0.0, gather + scatter - backward, 0.0)
    return Covered(Passes(forward, 0.0, backward, 0.0), hidden, Passes(1, 0, 2, 0))
