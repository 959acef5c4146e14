"""What LAMB, CAME, Muon and the narrow AdamW share: the gradient norm, sums over logical matrices, bad steps skipped.

Skipping a bad step and scaling gradients need no host synchronisation. The protocol is that of torch's fused
optimizers: the attributes ``found_inf`` (1.0 skips the step) and ``grad_scale`` (gradients are divided by it), both
tensors or None, are set on the optimizer before `step`. Unlike torch's fused kernels, these leave ``.grad`` as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

# As in torch.nn.utils.clip_grad_norm_.
_GUARD = 1e-6


@torch.no_grad()
def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients taken together: one pass, sums in float32 (float64 for float64 gradients).

    Parameters without a gradient are left out.
    """
    found = [p for p in parameters if p.grad is not None]
    if not found:
        return torch.zeros(())
    gradients = [p.grad for p in found if p.grad is not None]
    wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    norms = torch._foreach_norm(gradients, 2, dtype=wide)
    # One operator for all of them, instead of a square for each.
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return norm


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of norm `norm` must be divided by so that their norm is at most `max_norm`; at least 1.

    Optimizers divide while they read the gradients (``grad_scale``), so clipping costs no pass of its own.
    """
    return ((norm + _GUARD) / max_norm).clamp(min=1.0)


# LAMB needs the norm of a whole matrix, CAME the means of its rows and columns. Both compute partial sums of what they
# hold and hand them to a `Reduction`; a sharded layout passes one that adds over its groups, so that no optimizer ever
# sees a process group. It is called once for many parameters, which it may pack into one collective, with
#   sums: `sums[i]`, of any shape, was summed over the local part of `parameters[i]`,
#   parameters: those that the sums belong to,
#   dim: the dimension that was summed away: -1 (columns), -2 (rows) or None (every dimension);
# it returns the sums over whole logical matrices.
Reduction = Callable[[list[Tensor], Sequence[Tensor], int | None], list[Tensor]]

# The 2-norm of the gradients of these parameters and of what other ranks hold, a scalar.
GradientNorm = Callable[[Iterable[Tensor]], Tensor]


def local(sums: list[Tensor], parameters: Sequence[Tensor], dim: int | None) -> list[Tensor]:
    """The `Reduction` of whole matrices: what was summed here is complete."""
    return sums


STACK_BYTES = 1 << 28
"""Of a stack of matrices that are updated at once: enough to fill any device, and little beside the model."""


class SkippingOptimizer(torch.optim.Optimizer):
    """An optimizer whose step honours ``found_inf`` and ``grad_scale``; subclasses write `_update` and `_new_state`."""

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, unless ``found_inf`` is 1.0."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # On a CPU `found_inf` is simply read; elsewhere the step runs with masks that leave parameters and state as
        # they are, so that the host never waits for the device.
        bad = self.found_inf
        if bad is not None and bad.device.type == "cpu" and not self.as_on_device:
            if bad.item() != 0.0:
                return loss
            bad = None
        self._update(None if bad is None else bad == 0.0, self.grad_scale)
        return loss

    # Tests set this, so that what only devices do (masks, stacks of matrices) is checked on a CPU as well.
    as_on_device: bool = False

    def create_state(self) -> None:
        """Make the state of every parameter now, so that a checkpoint can be loaded before the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._ensure_state(parameter, group)

    def _ensure_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if not self.state[parameter]:
            refuse_unfit(parameter)
            self.state[parameter].update(self._new_state(parameter, group))

    def _with_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        found = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in found:
            if parameter.grad.is_sparse:
                raise ValueError("sparse gradients are not supported: build the embedding with sparse=False")
            self._ensure_state(parameter, group)
        return found

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        raise NotImplementedError

    def _update(self, keep: Tensor | None, grad_scale: Tensor | None) -> None:
        raise NotImplementedError


def check_settings(compile: bool = False, reduction: Reduction = local, **at_least_zero: float) -> None:
    """Refuse settings below zero, and a compiled step whose sums are taken over ranks. `ValueError`: one of these."""
    for name, value in at_least_zero.items():
        if not value >= 0:
            raise ValueError(f"{name} = {value} is negative: give a number of at least 0")
    if compile and reduction is not local:
        raise ValueError("compile = True does not fit a reduction over ranks: leave compile off for sharded layouts")


def check_rates(betas: Sequence[float]) -> None:
    """Refuse decay rates of moments outside [0, 1). `ValueError`: one of them is."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas = {betas} are not all in [0, 1): give decay rates such as (0.9, 0.95)")


def step_counter(
    group: dict[str, Any],
    state: Mapping[Tensor, dict[str, Tensor]],
    device: torch.device,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Steps taken: one tensor for all parameters of a group."""
    found = next((state[p] for p in group["params"] if "step" in state[p]), None)
    return torch.zeros((), dtype=dtype, device=device) if found is None else found["step"]


def share_step_counters(optimizer: torch.optim.Optimizer) -> None:
    """Give each group one counter again, of which `load_state_dict` makes one for each parameter."""
    for group in optimizer.param_groups:
        states = [optimizer.state[p] for p in group["params"] if "step" in optimizer.state[p]]
        for state in states:
            state["step"] = states[0]["step"]


def refuse_unfit(parameter: Tensor) -> None:
    """Refuse parameters that are complex or of fewer than 32 bits, which the arithmetic is not made for.

    Raises:
        ValueError: the parameter is such a one.
    """
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"parameters of {parameter.dtype} are not updated: keep master weights in float32 and cast them to compute"
        )


def twin(parameters: Sequence[Tensor]) -> ModuleType | None:
    """The Triton kernels, where parameters like these, with the gradients they have, are on a GPU and Triton is there.

    They take fp32 parameters that lie as they are walked, and gradients alike, of one dtype of at most 32 bits.
    """
    if not parameters or not on_gpu(parameters[0]):
        return None
    gradients = [p.grad for p in parameters if p.grad is not None]
    fits = all(p.dtype == torch.float32 and p.is_contiguous() and p.device == parameters[0].device for p in parameters)
    fits = fits and all(g.is_contiguous() and g.dtype == gradients[0].dtype for g in gradients)
    if not fits or (gradients and gradients[0].dtype not in (torch.float32, torch.bfloat16, torch.float16)):
        return None
    try:
        from phalanx.optim import update_triton
    except ImportError:
        return None
    return update_triton


def on_gpu(tensor: Tensor) -> bool:
    """Whether the tensor is on a GPU. Tests of the kernels say so of a CPU, where Triton interprets them."""
    return tensor.is_cuda


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


def stacks(parameters: list[Tensor], *, alone: bool) -> list[list[Tensor]]:
    """Lists of parameters of one shape to update as one stack of at most `STACK_BYTES`, in order of first use.

    `alone` is faster on a CPU, whose cache then holds the temporaries.
    """
    if alone:
        return [[parameter] for parameter in parameters]
    shapes: dict[tuple[Any, ...], list[Tensor]] = {}
    for p in parameters:
        kind = p.dtype if p.grad is None else p.grad.dtype
        shapes.setdefault((p.shape, p.device, p.dtype, kind), []).append(p)
    found = []
    for alike in shapes.values():
        most = max(1, STACK_BYTES // max(1, alike[0].numel() * alike[0].element_size()))
        found += [alike[start : start + most] for start in range(0, len(alike), most)]
    return found


def stacked(tensors: list[Tensor]) -> Tensor:
    """Tensors of one shape along a new first dimension; of a single one a view."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)


def stacked_gradients(parameters: list[Tensor], inverse: Tensor | None, keep: Tensor | None) -> Tensor:
    """`clean_gradients` of parameters of one shape, as one stack, in a number of kernels that is constant.

    On a skipped step they are -0.0, which leaves every sum as it is, bit for bit.
    """
    stack = stacked([p.grad for p in parameters if p.grad is not None]).to(parameters[0].dtype)
    if keep is not None:
        stack = torch.where(keep.to(stack.device), stack, -0.0)
    return stack if inverse is None else stack * inverse
