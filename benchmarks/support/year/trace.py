"""The faults of a cluster of 400 GPU servers over 349 days (InfiniteHBD-Trace); the planner reads the same."""

from phalanx.simulate.failure_model import DAY_S
from phalanx.simulate.failure_trace import NODES, Effect, Fault, effect_of, read_trace

__all__ = ["DAY_S", "NODES", "Effect", "Fault", "effect_of", "read_trace"]
