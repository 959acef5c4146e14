"""The norm of the whole gradient, and the divisor that clips it, as tensors: nothing waits for the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# As in torch.nn.utils.clip_grad_norm_.
_GUARD = 1e-6


@torch.no_grad()
def grad_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients taken together: one pass, sums in float32 (float64 for float64 gradients).

    Args:
        parameters: those without a gradient are left out.
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
