"""A layout that does not fit: what else it could do with its memory, on the same ranks."""

from __future__ import annotations

from phalanx.core.errors import UserError
from phalanx.plan.search.constraints import Constraints, parse
from phalanx.plan.search.options import Machine
from phalanx.plan.search.scored import Costs
from phalanx.plan.search.search import search
from phalanx.plan.types import Job, Prediction, Strategy

_AXES = ("pipeline", "replicate", "shard", "context", "tensor", "expert")
_ANY = ("inside_host=none", "context_tokens=any", "imbalance=any")


def reliefs(job: Job, strategy: Strategy, machine: Machine, costs: Costs, most: int = 3) -> tuple[Prediction, ...]:
    """The fastest layouts that fit and share the devices as `strategy` does; none where none fits.

    They differ from it in the micro-batch, in what is computed again, and in what of the state is split.
    """
    try:
        return search(job, machine, costs, _like(strategy), most).best
    except UserError:  # nothing fits, or the program of this layout can do what a search does not try
        return ()


def _like(strategy: Strategy) -> Constraints:
    """What keeps the ranks as they are, and their schedule."""
    kept = [f"{axis}={getattr(strategy, axis)}" for axis in _AXES]
    if strategy.pipeline > 1:
        kept += [f"schedule={strategy.schedule}", f"chunks={strategy.chunks}"]
    if strategy.tensor > 1:
        kept.append(f"tensor_overlap={strategy.tensor_overlap}")
    if strategy.context > 1:
        kept.append(f"context_method={strategy.context_method}")
    return parse([*kept, *_ANY])
