"""What of the data-parallel exchange nothing covers: after the last backward pass and before the first forward pass."""

from __future__ import annotations

from collections.abc import Sequence


def reduce_tail_s(
    reduce_s: Sequence[float], ready_s: Sequence[float], backward_s: Sequence[float], buckets: int
) -> float:
    """Seconds after the end of a rank's computing until the gradients of all its chunks are reduced.

    Chunks are reduced one after another in the order in which their last backward passes end. A chunk in several
    buckets begins while its last backward pass runs; its last bucket waits for the end.

    Args:
        reduce_s: of each chunk.
        ready_s: when the last backward pass of each chunk ends.
        backward_s: how long that takes.
        buckets: in each chunk.
    """
    free = 0.0
    for ready, seconds, backward in sorted(zip(ready_s, reduce_s, backward_s, strict=True)):
        begin = max(free, ready - backward * (1 - 1 / buckets))
        free = max(begin + seconds, ready + seconds / buckets)
    return max(free - max(ready_s), 0.0)


def gather_lead_s(gather_s: Sequence[float], needed_s: Sequence[float]) -> float:
    """Seconds by which gathering weights, chunk after chunk from the start of the step, delays a rank's forward passes.

    Args:
        gather_s: of each chunk.
        needed_s: when the first forward pass of each chunk could begin.
    """
    done, lead = 0.0, 0.0
    for needed, seconds in sorted(zip(needed_s, gather_s, strict=True)):
        done += seconds
        lead = max(lead, done - needed)
    return lead
