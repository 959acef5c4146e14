"""What LAMB, CAME and Muon share: skipping a bad step and scaling gradients without a host synchronisation.

The protocol is that of torch's fused optimizers: the attributes ``found_inf`` (1.0 skips the step) and ``grad_scale``
(gradients are divided by it), both tensors or None, are set on the optimizer before `step`. Unlike torch's fused
kernels, these optimizers leave ``.grad`` as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class SkippingOptimizer(torch.optim.Optimizer):
    """An optimizer whose step honours ``found_inf`` and ``grad_scale``; subclasses write `_update` and `_new_state`."""

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, unless ``found_inf`` is 1.0.

        Where ``found_inf`` lies on a CPU it is simply read; elsewhere the step runs with masks that leave parameters
        and state as they are, so the host never waits for the device.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        bad = self.found_inf
        if bad is not None and bad.device.type == "cpu" and not self._masked_on_cpu:
            if bad.item() != 0.0:
                return loss
            bad = None
        self._update(None if bad is None else bad == 0.0, self.grad_scale)
        return loss

    # Tests set this, so that the masked path, which only devices take, is checked on a CPU as well.
    _masked_on_cpu: bool = False

    def create_state(self) -> None:
        """Make the state of every parameter now, so that a checkpoint can be loaded before the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter, group)

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            refuse_unfit(parameter)
            state.update(self._new_state(parameter, group))
        return state

    def _with_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        found = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in found:
            if parameter.grad.is_sparse:
                raise ValueError("sparse gradients are not supported: build the embedding with sparse=False")
            self._state_of(parameter, group)
        return found

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        raise NotImplementedError

    def _update(self, keep: Tensor | None, grad_scale: Tensor | None) -> None:
        raise NotImplementedError


def refuse_unfit(parameter: Tensor) -> None:
    """Refuse what the arithmetic is not made for.

    Raises:
        ValueError: the parameter is complex or holds fewer than 32 bits.
    """
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"parameters of {parameter.dtype} are not updated: keep master weights in float32 and cast them to compute"
        )


def inverse_scale(grad_scale: Tensor | None, keep: Tensor | None, like: Tensor) -> Tensor | None:
    """``1 / grad_scale`` as a scalar tensor beside `like`; 1 on a skipped step, where the scale may be NaN."""
    if grad_scale is None:
        return None
    inverse = grad_scale.to(device=like.device, dtype=torch.float64).reciprocal()
    if keep is not None:
        inverse = torch.where(keep.to(like.device), inverse, 1.0)
    return inverse.to(like.dtype)


def clean_gradients(parameters: list[Tensor], inverse: Tensor | None, keep: Tensor | None) -> list[Tensor]:
    """Gradients in the parameters' dtype, times `inverse`, and zero (never NaN) on a skipped step."""
    gradients = [p.grad.to(p.dtype) for p in parameters if p.grad is not None]
    if keep is not None:
        gradients = [torch.where(keep.to(g.device), g, 0.0) for g in gradients]
    if inverse is not None:
        gradients = list(torch._foreach_mul(gradients, inverse))
    return gradients


def bundles(parameters: list[Tensor], *, together: bool) -> Iterator[list[Tensor]]:
    """Lists of parameters to update at once, each of one device and dtype.

    On a CPU one tensor after the other is faster (temporaries stay in the cache); on other devices, and where a
    reduction should be called once, all go together.
    """
    if not parameters:
        return
    if not together and parameters[0].device.type == "cpu":
        yield from ([parameter] for parameter in parameters)
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    yield from kinds.values()
