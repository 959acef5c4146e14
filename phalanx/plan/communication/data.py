"""What data-parallel ranks exchange once per step: gradients, and weights where they are split."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.either import functions
from phalanx.plan.types import Floats, Ints, Job, Strategy


@dataclass(frozen=True)
class Exchange:
    """Seconds of what a rank exchanges for some of its weights.

    Attributes:
        reduce_s: summing their gradients.
        gather_s: collecting the weights that other ranks updated; 0 where every rank updates all.
    """

    reduce_s: Floats
    gather_s: Floats


def exchange(job: Job, strategy: Strategy, cluster: Cluster, weights: Floats, ranks: Ints | None = None) -> Exchange:
    """Exchanges for `weights` elements of a rank, as one message each way.

    Gradients are summed over data-parallel and context ranks. Where state is split (ZeRO 1 and up) they are scattered
    over the ranks that split it and all-reduced between the copies; updated weights are gathered.

    Args:
        ranks: that share these weights; None: all data-parallel and context ranks (experts are shared by fewer).
    """
    stride = strategy.tensor
    sharded = strategy.shard * strategy.context
    copies = strategy.replicate
    if ranks is not None:
        sharded, copies = _fewer(sharded, copies, ranks)
    num_bytes = weights * job.software.reduce_bytes
    if strategy.zero == 0:
        return Exchange(cluster.collective_s("all_reduce", num_bytes, sharded * copies, stride), 0.0 * weights)
    between: Floats = 0.0
    if not (isinstance(copies, int) and copies == 1):
        between = cluster.collective_s("all_reduce", num_bytes / sharded, copies, stride * sharded)
    if strategy.zero == 3:  # all else goes in every pass
        return Exchange(between, 0.0 * weights)
    scatter = cluster.collective_s("reduce_scatter", num_bytes, sharded, stride)
    gathered = weights * job.software.gather_bytes
    gather = cluster.collective_s("all_gather", gathered, sharded, stride)
    return Exchange(scatter + between, gather)


def _fewer(sharded: Ints, copies: Ints, ranks: Ints) -> tuple[Ints, Ints]:
    """`ranks` of a group, its copies first."""
    f = functions(sharded, copies, ranks)
    copies_left = f.least(copies, ranks)
    return f.largest(ranks // copies_left, 1), copies_left
