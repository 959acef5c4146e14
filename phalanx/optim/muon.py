"""Muon: momentum orthogonalised by Newton-Schulz, for the matrices inside the blocks.

This is `torch.optim.Muon` (its settings, its state, its arithmetic, checked against it in the tests) with what the
training loop needs besides: skipping a bad step and scaling gradients without waiting for the device, and on GPUs
batched products over stacks of matrices of a shape.

On a CPU the Newton-Schulz products run at the speed of any other product, so Muon costs what its arithmetic costs:
5 (4 n² m + 2 n³) operations per n x m matrix (n <= m) and step, however many tokens the step has.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.linear import cpu_has_fast_bf16
from phalanx.optim.skipping import SkippingOptimizer, check_settings, inverse_scale, stacked, stacked_gradients, stacks

# Keller Jordan's coefficients, as in torch: steepest at zero.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(SkippingOptimizer):
    """Muon for matrices, fp32 or fp64. `ValueError`: a parameter is not a matrix, or a setting is out of range."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,  # decoupled: parameters shrink by ``lr * weight_decay`` before the update
        momentum: float = 0.95,
        nesterov: bool = True,  # look one momentum step ahead
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,  # of the quintic Newton-Schulz polynomial
        eps: float = 1e-7,  # least norm a matrix is divided by
        ns_steps: int = 5,  # Newton-Schulz iterations, in bfloat16; in float32 on a CPU without bfloat16 in hardware
        # ``"original"`` scales an update by ``sqrt(max(1, rows / columns))``, ``"match_rms_adamw"`` by ``0.2
        # sqrt(max(rows, columns))`` so that it is as large as AdamW's (arXiv 2502.16982)
        adjust_lr_fn: str = "original",
    ) -> None:
        if adjust_lr_fn not in ("original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn = {adjust_lr_fn!r} is unknown: use 'original' or 'match_rms_adamw'")
        check_settings(lr=lr, weight_decay=weight_decay, momentum=momentum)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)
        self._cpu_dtype = torch.bfloat16 if cpu_has_fast_bf16() else torch.float32
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() != 2:
                    raise ValueError(f"Muon updates matrices, not shape {tuple(parameter.shape)}: use AdamW for it")

    def _new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def _update(self, keep: Tensor | None, grad_scale: Tensor | None) -> None:
        for group in self.param_groups:
            parameters = self._with_gradients(group)
            alone = bool(parameters) and parameters[0].is_cpu and not self.as_on_device
            for alike in stacks(parameters, alone=alone):  # on a CPU a batch is no faster
                inverse = inverse_scale(grad_scale, keep, alike[0])
                self._update_stack(group, alike, stacked_gradients(alike, inverse, keep), keep)

    def _update_stack(self, group: dict[str, Any], ps: list[Tensor], g_LNM: Tensor, keep: Tensor | None) -> None:
        momentum, lr, decay = group["momentum"], float(group["lr"]), group["weight_decay"]
        # Matrices of one shape: the number of kernels is the same for any number of them.
        buffers, gs = [self.state[p]["momentum_buffer"] for p in ps], list(g_LNM.unbind())
        if keep is None:
            torch._foreach_lerp_(buffers, gs, 1 - momentum)
            torch._foreach_mul_(ps, 1 - lr * decay)
        else:  # a weight in a tensor would be a kernel for each matrix; gradients of -0.0 change nothing
            kept = keep.to(g_LNM)
            torch._foreach_mul_(buffers, 1 - kept * (1 - momentum))
            torch._foreach_add_(buffers, gs, alpha=1 - momentum)
            torch._foreach_mul_(ps, 1 - kept * (lr * decay))
        if not group["nesterov"]:
            directions = stacked(buffers)
        elif len(ps) == 1:
            directions = torch.lerp(gs[0], buffers[0], momentum).unsqueeze(0)
        else:  # the stack is a copy of the gradients, so it may be overwritten
            torch._foreach_lerp_(gs, buffers, momentum)
            directions = g_LNM
        dtype = self._cpu_dtype if g_LNM.is_cpu else torch.bfloat16
        one = directions[0] if len(ps) == 1 else directions
        updates = orthogonalise(one, group["ns_coefficients"], group["ns_steps"], group["eps"], dtype)
        if len(ps) > 1:  # in rows and in the type of the parameters, else each would be added by a kernel of its own
            updates = updates.to(g_LNM.dtype, memory_format=torch.contiguous_format)
        if keep is not None:
            updates = torch.where(keep, updates, 0.0)
        rows, columns = ps[0].shape
        if group["adjust_lr_fn"] == "original":
            adjustment = math.sqrt(max(1.0, rows / columns))
        else:
            adjustment = 0.2 * math.sqrt(max(rows, columns))
        torch._foreach_add_(ps, list(updates.view_as(g_LNM).unbind()), alpha=-lr * adjustment)


def orthogonalise(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The nearest (about) semi-orthogonal matrix of one or of a stack, in `dtype`: ``U V^T`` of ``x = U S V^T``.

    The iteration is ``x <- a x + b (x x^T) x + c (x x^T)^2 x``; `eps` is the least Frobenius norm that is divided by.
    """
    a, b, c = coefficients
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    tall = x.size(-2) > x.size(-1)
    x = x.to(dtype)
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        gram = multiply_add(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, gram, x, beta=a)
    return x.mT if tall else x
