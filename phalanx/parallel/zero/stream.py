"""ZeRO-3: the weights of a unit (embedding, a block, the head) are whole only while it computes.

They are gathered before its forward pass and freed after it, gathered again before its backward pass and freed when
the gradient of its input is known; the weights of the unit that comes next are asked for meanwhile. A block that the
backward pass computes again finds its weights there: they are gathered before its backward pass begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.parallel.zero.bucket import Bucket


class Unit:
    """A module whose weights are gathered together.

    Args:
        module: what is called.
        buckets: those that hold its weights; a tied weight's belongs to two units.
        in_backward: whether its backward pass reads weights (that of an embedding does not).
    """

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket], in_backward: bool) -> None:
        self.buckets = list(buckets)
        self.needs_backward = in_backward
        self.before: Unit | None = None
        self.after: Unit | None = None
        self._backward = False
        module.register_forward_pre_hook(self._enter_forward, with_kwargs=True)
        module.register_forward_hook(self._leave_forward)

    def prefetch(self) -> None:
        """Start to gather."""
        for bucket in self.buckets:
            bucket.need()

    def release(self) -> None:
        """Free the weights."""
        self._backward = False
        for bucket in self.buckets:
            bucket.release()

    def _fetch(self, then: Unit | None) -> None:
        self.prefetch()
        if then is not None:
            then.prefetch()
        for bucket in self.buckets:
            bucket.wait()

    def _enter_forward(self, _module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._backward:  # computed again
            return
        self._fetch(self.after)
        if self.needs_backward and torch.is_grad_enabled():
            for tensor in _differentiable((*arguments, *named.values())):
                tensor.register_hook(self._leave_backward)  # type: ignore[no-untyped-call]
                break

    def _leave_forward(self, _module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
        if self._backward:
            return
        self.release()
        if self.needs_backward and torch.is_grad_enabled():
            for tensor in _differentiable(output if isinstance(output, tuple) else (output,)):
                tensor.register_hook(self._enter_backward)  # type: ignore[no-untyped-call]

    def _enter_backward(self, _gradient: Tensor) -> None:
        if not self._backward:
            self._backward = True
            before = self.before
            self._fetch(before if before is not None and before.needs_backward else None)

    def _leave_backward(self, _gradient: Tensor) -> None:
        self.release()


def link(units: Sequence[Unit]) -> None:
    """Tell units, in order of use, which comes before and after each."""
    for unit, following in itertools.pairwise(units):
        unit.after, following.before = following, unit


def _differentiable(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor) and value.requires_grad]
