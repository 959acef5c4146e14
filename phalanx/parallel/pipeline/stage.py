"""One stage under autograd: keeps what the backward pass of each micro-batch needs, and no longer than that."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.parallel.deferred import WeightQueue


class _Live(NamedTuple):
    """A micro-batch between its forward and its backward pass: the leaf it began with, and where its graph ends.

    The edge holds the graph without the values of the stage's output, which are free once they are sent.
    """

    x: Tensor | None
    output: GradientEdge


class AutogradStage:
    """A `StageRunner` over any differentiable function.

    Args:
        stage: ``stage(x, micro_batch) -> output``: x is None on the first stage, a leaf elsewhere (not to be changed in
            place); the output of the last stage is a scalar, of which gradients are taken.
        queue: where the layers of this stage, and of no other, put off weight gradients; None: they make them at once,
            and a schedule that splits backward passes gains nothing.
    """

    def __init__(self, stage: Callable[[Tensor | None, int], Tensor], queue: WeightQueue | None = None) -> None:
        self._stage = stage
        self._queue = WeightQueue() if queue is None else queue
        self._live: dict[int, _Live] = {}

    @property
    def live(self) -> int:
        """Micro-batches between their forward and their backward pass (of inputs, where it is split)."""
        return len(self._live)

    @property
    def is_splitting(self) -> bool:
        """Whether a backward pass is going on that leaves weight gradients to `backward_weights`."""
        return self._queue.deferring

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """The stage's output, detached; nothing is kept where gradients are off."""
        if not torch.is_grad_enabled():
            return self._stage(x, micro_batch)
        leaf = None if x is None else x.detach().requires_grad_()
        output = self._stage(leaf, micro_batch)
        assert output.requires_grad, "the output of this stage depends on no parameter and on no input"
        self._live[micro_batch] = _Live(leaf, get_gradient_edge(output))
        return output.detach()

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """All gradients of `micro_batch`; returns that of its input.

        Args:
            gradient: of the output; None on the last stage.
        """
        x, output = self._live.pop(micro_batch)
        torch.autograd.backward((output,), None if gradient is None else (gradient,))
        return None if x is None else x.grad

    def backward_input(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """As `backward`, with the weight gradients that layers can put off left to `backward_weights`."""
        self._queue.begin(micro_batch)
        try:
            return self.backward(micro_batch, gradient)
        finally:
            self._queue.end()

    def backward_weights(self, micro_batch: int) -> None:
        """Make the weight gradients that `backward_input` put off."""
        self._queue.run(micro_batch)
