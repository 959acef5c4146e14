"""The faults of a cluster of 400 GPU servers over 349 days (InfiniteHBD-Trace); the planner reads the same."""

from phalanx.plan.months.trace import NODES, Effect, Fault, effect_of, read_trace
from phalanx.plan.months.values import DAY_S

__all__ = ["DAY_S", "NODES", "Effect", "Fault", "effect_of", "read_trace"]
