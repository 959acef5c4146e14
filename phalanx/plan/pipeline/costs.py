"""What goes into a pipeline's time and what comes out of it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Seconds that one micro-batch takes on each stage, in the order of the model, and between stages.

    Attributes:
        forward_s: of the forward pass, one number for each of `ranks * chunks` stages.
        backward_s: of the whole backward pass; used by schedules that do not split it.
        backward_input_s: of the backward pass for the stage's input; used by schedules that split it.
        backward_weight_s: of the backward pass for the stage's weights; likewise.
        send_s: of a message between stage i and i + 1, either way; one number for each of `ranks * chunks - 1`
            boundaries. Boundaries inside a rank (the turn of a V) cost nothing, whatever is said here.
        blocking: a rank computes nothing while it sends. As in Megatron-LM without overlap, it may receive at the
            same time (links go both ways at once), so a pair of passes costs a rank in the middle two messages. Else
            sending is a delay between two ranks, which other work of both may hide.
    """

    forward_s: Array
    backward_s: Array
    backward_input_s: Array
    backward_weight_s: Array
    send_s: Array
    blocking: bool = False


@dataclass(frozen=True, eq=False)
class StepTime:
    """When things happen in one step, in seconds from its first forward pass.

    On every rank, `busy_s + bubble_s + imbalance_s + sends_s` is `span_s`. Times by rank and chunk count a rank's
    chunks in the order of the model.

    Attributes:
        span_s: to the end of the last action on any rank.
        busy_s: computing, by rank.
        bubble_s: waiting for the pipeline to fill and to drain: what is waited where all stages cost their mean and
            messages nothing. The same for all ranks.
        imbalance_s: waiting because stages differ, by rank. Negative on a rank with more work than the mean, where
            it makes up for what `busy_s` has too much.
        sends_s: what messages add to the step; the same for all ranks.
        sent_s: time that a rank's messages are on the way, hidden or not.
        end_s: when each rank's last action ends.
        first_forward_begin_s: when the first forward pass of a chunk begins, by rank and chunk.
        last_backward_end_s: when the gradients of its last micro-batch are complete, those of weights too, so that the
            chunk's can be reduced.
        in_flight: micro-batches whose activations a chunk holds when its rank holds most of them, all its chunks
            together; by rank and chunk.
    """

    span_s: float
    busy_s: Array
    bubble_s: Array
    imbalance_s: Array
    sends_s: Array
    sent_s: Array
    end_s: Array
    first_forward_begin_s: Array
    last_backward_end_s: Array
    in_flight: NDArray[np.int64]
