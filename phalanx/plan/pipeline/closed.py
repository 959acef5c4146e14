"""Closed forms of a step's time in a pipeline, for many layouts at once. Torch-free."""

from __future__ import annotations

from typing import Literal

import numpy as np

from phalanx.plan.types import Floats, Ints


def even_span(
    schedule: Literal["1f1b", "interleaved_1f1b", "interleaved_zero_bubble"],
    ranks: Ints,
    chunks: Ints,
    micro_batches: Ints,
    forward_s: Floats,
    backward_s: Floats,
    weights_s: Floats = 0.0,
) -> Floats:
    """Seconds of a step whose stages all take as long and whose messages nothing, exactly. All arguments broadcast.

    The bubble of 1f1b and interleaved_1f1b is that of arXiv 2104.04473, section 2.2. That of the split backward pass,
    for every rank but one, is F + I - W (ZB-H1 of arXiv 2401.10241), but not less than F, nor than I. For zbv there
    is no formula here, as there are many cases.

    Args:
        forward_s: of one stage and micro-batch.
        backward_s: of the whole backward pass, or for the input only where `schedule` splits it.
        weights_s: of the backward pass for the weights, where `schedule` splits it.
    """
    passes = forward_s + backward_s
    bubble = passes
    if schedule == "interleaved_zero_bubble":
        bubble = np.maximum(np.maximum(forward_s, backward_s), passes - weights_s)
        passes = passes + weights_s
    return chunks * micro_batches * passes + (ranks - 1) * bubble
