"""Memory of a rank: parameters, gradients, optimizer, activations, loss head, and what comes and goes.

`rank_memory` gives every pipeline rank of one strategy, `memory_bound` the fullest of many strategies at once.
"""

from phalanx.plan.memory.bound import memory_bound
from phalanx.plan.memory.rank import rank_memory

__all__ = ["memory_bound", "rank_memory"]
