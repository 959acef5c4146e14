"""What happens to parameters between two calls of a foreign loop, heard from the optimizers themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_TENSORS = 16
_ELEMENTS = 4096
_LOOKS = 8


class Updates:
    """Calls `before` before each update of any of `optimizers`, and remembers whether one moved something.

    That an optimizer has stepped is no evidence: where training has converged, or all gradients are zero, a healthy
    step changes nothing. Whether it does is seen in some elements of some parameters, copied before the step and
    compared after it: in the first steps after each call of `stepped`, then ever more rarely.

    Args:
        optimizers: those of the loop.
        before: called before every update.
    """

    def __init__(self, optimizers: Iterable[Optimizer], before: Callable[[], None]) -> None:
        self._before = before
        self._steps: dict[Optimizer, int] = {}
        self._copies: dict[Optimizer, list[tuple[Tensor, Tensor]]] = {}
        self._moved: list[Tensor] = []
        self._hooks: list[Any] = []
        self.watch(optimizers)

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Listen to these instead of those before."""
        self.close()
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._on_step))
            self._hooks.append(optimizer.register_step_post_hook(self._on_stepped))

    def stepped(self) -> bool:
        """Whether, since the last call, a step of an optimizer was seen to change a parameter; waits for the device."""
        moved, self._moved = self._moved, []
        self._steps = {}
        return any(bool(each) for each in moved)

    def close(self) -> None:
        """Let the optimizers alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._before()
        step = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if step <= _LOOKS or step.bit_count() == 1:
            self._copies[optimizer] = [(some, some.clone()) for some in _some_elements(optimizer)]

    def _on_stepped(self, optimizer: Optimizer, *_: Any) -> None:
        copies = self._copies.pop(optimizer, [])
        self._moved += [(some != before).any() for some, before in copies]


def _some_elements(optimizer: Optimizer) -> list[Tensor]:
    """Views of parameters that a step may change; of those with gradients, unless a closure is yet to make these."""
    parameters = [p for group in optimizer.param_groups if _can_move(group) for p in group["params"] if p.numel()]
    parameters = [p for p in parameters if p.grad is not None] or parameters
    return [_thinned(p.detach()) for p in parameters[:: -(-len(parameters) // _TENSORS) or 1]]


def _can_move(group: dict[str, Any]) -> bool:
    """A learning rate of None is one that the optimizer finds for itself."""
    rate = group.get("lr")
    return rate is None or float(rate) != 0.0


def _thinned(tensor: Tensor) -> Tensor:
    """Elements at equal distances, so many of each dimension that they are not too many in all."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    kept = int(_ELEMENTS ** (1 / max(1, local.dim())))
    return local[tuple(slice(None, None, max(1, -(-size // kept))) for size in local.shape)]
