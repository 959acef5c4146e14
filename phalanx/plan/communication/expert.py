"""What a mixture layer exchanges between the ranks that hold different experts."""

from __future__ import annotations

from phalanx.plan.communication.covered import Covered
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.types import Strategy
from phalanx.plan.work.local import Local
from phalanx.plan.work.mixture import routed_rows
from phalanx.plan.work.operations import Passes


def expert(strategy: Strategy, cluster: Cluster, local: Local) -> Covered:
    """Rows go to their experts and come back, forward and backward, with nothing beside (GShard, arXiv 2006.16668).

    With sequence parallelism each tensor-parallel rank sends the rows that it keeps.
    """
    if isinstance(strategy.expert, int) and strategy.expert == 1:
        return Covered()
    again = 1.0 if strategy.recompute == "full" else 0.0
    share = local.kept_tokens / local.tokens
    num_bytes = routed_rows(local) * share * local.model.hidden * local.compute_bytes
    each = 2 * cluster.collective_s("all_to_all", num_bytes, strategy.expert, strategy.tensor * strategy.context)
    calls = 2 * (strategy.expert > 1)
    return Covered(Passes(each, again * each, each, 0.0), collectives=Passes(calls, again * calls, calls, 0))
