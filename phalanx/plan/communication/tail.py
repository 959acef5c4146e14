"""What of the data-parallel exchange nothing covers: after the last backward pass and before the first forward pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def reduce_tail_s(reduce_s: Array, ready_s: Array, backward_s: Array, buckets: Array) -> Array:
    """Seconds after the end of each rank's computing until the gradients of all its chunks are reduced.

    Chunks are reduced one after another in the order in which their last backward passes end. A chunk in several
    buckets begins while its last backward pass runs; its last bucket waits for the end.

    Args:
        reduce_s: by chunk and rank.
        ready_s: when the last backward pass of each chunk ends.
        backward_s: how long that takes.
        buckets: in each chunk, by rank.
    """
    ready_s, reduce_s, backward_s = _in_order(ready_s, reduce_s, backward_s)
    begin_s = ready_s - backward_s * (1 - 1 / buckets)
    last_s = ready_s + reduce_s / buckets
    free_s = np.zeros(len(buckets))
    for begin, seconds, last in zip(begin_s, reduce_s, last_s, strict=True):
        free_s = np.maximum(np.maximum(free_s, begin) + seconds, last)
    tail_s: Array = np.maximum(free_s - ready_s[-1], 0.0)
    return tail_s


def gather_lead_s(gather_s: Array, needed_s: Array) -> Array:
    """Seconds by which gathering weights, chunk after chunk from the start of the step, delays each rank's forwards.

    Args:
        gather_s: by chunk and rank.
        needed_s: when the first forward pass of each chunk could begin.
    """
    needed_s, gather_s = _in_order(needed_s, gather_s)
    late_s: Array = (gather_s.cumsum(axis=0) - needed_s).max(axis=0, initial=0.0)
    return late_s


def _in_order(when_s: Array, *others: Array) -> tuple[Array, ...]:
    """All with the chunks of each rank in the order of `when_s`."""
    if len(when_s) == 1:
        return when_s, *others
    order, ranks = when_s.argsort(axis=0, kind="stable"), np.arange(when_s.shape[1])
    return tuple(each[order, ranks] for each in (when_s, *others))
