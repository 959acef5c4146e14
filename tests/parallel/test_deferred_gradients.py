"""Weight gradients that are put off: made when asked, added up, in the type in which gradients are kept."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from phalanx.parallel.deferred_gradients import WeightQueue


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_gradients_of_bf16_weights_are_added_in_the_type_that_they_are_kept_in(kept: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    weight.grad_dtype = kept
    queue = WeightQueue()
    for micro_batch, value in enumerate((1.0, 1 / 512)):  # the sum needs more digits than bf16 has
        queue.begin(micro_batch)
        queue.put(weight, partial(torch.full, (2,), value, dtype=torch.bfloat16))
        queue.end()
    assert weight.grad is None and queue.waiting == 2
    queue.run(0)
    queue.run(1)
    assert queue.waiting == 0
    assert weight.grad is not None and weight.grad.dtype == kept
    assert weight.grad.tolist() == [1 + 1 / 512 if kept == torch.float32 else 1.0] * 2
