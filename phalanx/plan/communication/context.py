"""What context parallelism exchanges in one layer: keys and values in a ring, or heads among all."""

from __future__ import annotations

from phalanx.plan.communication.covered import Covered, beside
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.types import Floats, Strategy
from phalanx.plan.work.local import Local
from phalanx.plan.work.operations import Passes


def context(strategy: Strategy, cluster: Cluster, local: Local, attention: Passes) -> Covered:
    """The exchanges of one layer whose attention takes `attention` seconds.

    Ring: in each of ``context - 1`` hops, a rank sends the keys and values that it has while it attends to them, which
    slows attention down; backward their gradients travel too (Liu et al., arXiv 2310.01889). All to all: q, k, v before
    attention and the result after it change from a split sequence to split heads (Ulysses, arXiv 2309.14509); nothing
    covers that.
    """
    if isinstance(strategy.context, int) and strategy.context == 1:
        return Covered()
    again = 1.0 if strategy.recompute == "full" else 0.0
    if strategy.context_method == "ring":
        forward, forward_hidden = _ring(strategy, cluster, _key_bytes(local), attention.forward)
        backward, backward_hidden = _ring(strategy, cluster, 2 * _key_bytes(local), attention.backward_input)
        hops = strategy.context - 1
        return Covered(
            Passes(forward, again * forward, backward, 0.0),
            Passes(forward_hidden, again * forward_hidden, backward_hidden, 0.0),
            Passes(hops, again * hops, hops, 0),
        )
    num_bytes = local.tokens * (local.projection_rows + local.query_rows) * local.compute_bytes
    each = cluster.collective_s("all_to_all", num_bytes, strategy.context, strategy.tensor)
    calls = 2 * (strategy.context > 1)
    return Covered(Passes(each, again * each, each, 0.0), collectives=Passes(calls, again * calls, calls, 0))


def _key_bytes(local: Local) -> Floats:
    """Keys and values of a rank's tokens."""
    return local.tokens * (local.projection_rows - local.query_rows) * local.compute_bytes


def _ring(strategy: Strategy, cluster: Cluster, num_bytes: Floats, attention_s: Floats) -> tuple[Floats, Floats]:
    """Exposed and hidden seconds of one turn of the ring."""
    send = cluster.send_s(num_bytes, strategy.tensor)
    hops = strategy.context - 1
    shown = hops * beside(send, attention_s / strategy.context)
    return shown, hops * send - shown
