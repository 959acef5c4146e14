"""Weight gradients put off: the zero-bubble schedules compute them in the time in which a stage would wait.

The backward pass of a stage then makes only the gradients of activations, which the stage before it waits for; what
the weights need (the layer's input and the gradient of its output) is put into a queue, and worked off when the
schedule says so (arXiv 2401.10241, section 2). Small parameters (norms, biases) are not put off.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class WeightQueue:
    """Weight gradients of one stage still to be made, by micro-batch.

    A layer of the stage asks `deferring` in its backward; if it is True, it calls `put` and returns None for the
    weight's gradient, else it makes the gradient at once.
    """

    def __init__(self) -> None:
        self.deferring = False
        self._current = 0
        self._waiting: dict[int, list[tuple[Tensor, Callable[[], Tensor]]]] = {}

    def begin(self, micro_batch: int) -> None:
        """From now on, until `end`, put off what the backward pass of `micro_batch` makes for weights."""
        self.deferring, self._current = True, micro_batch

    def end(self) -> None:
        """Stop putting off."""
        self.deferring = False

    def put(self, parameter: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Put off one gradient of a stored `parameter`; `gradient` makes it, in the parameter's shape."""
        self._waiting.setdefault(self._current, []).append((parameter, gradient))

    @torch.no_grad()
    def run(self, micro_batch: int) -> None:
        """Make the gradients of `micro_batch` and add them to their parameters' ``.grad``."""
        for parameter, make in self._waiting.pop(micro_batch, []):
            gradient = make().to(parameter.grad_dtype or parameter.dtype)  # weights kept in bf16 have fp32 gradients
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    @property
    def waiting(self) -> int:
        """Gradients that are still to be made, of all micro-batches."""
        return sum(len(entries) for entries in self._waiting.values())
