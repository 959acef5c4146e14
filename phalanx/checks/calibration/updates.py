"""What follows the gradients of a step: their norm, and the update by each optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch

from phalanx.checks.calibration.stopwatch import Case
from phalanx.optim.build import OptimizerSet, build_optimizer
from phalanx.optim.config import Kind, OptimConfig


def cases(widths: tuple[int, ...], device: torch.device) -> list[Case]:
    """The norm and each optimizer's step over the matrices of one layer of each width, 12 D x D in all."""
    found = []
    for width in widths:
        parameters = _layer(width, device)
        sizes = {"width": width, "parameters": sum(p.numel() for p in parameters.values())}
        for kind in get_args(Kind):
            optimizer = build_optimizer(OptimConfig(name=kind), parameters)
            found.append(Case(kind, sizes, "fp32", _step(optimizer, device)))
        found.append(Case("gradient_norm", sizes, "fp32", optimizer.clip))
    return found


def _layer(width: int, device: torch.device) -> dict[str, torch.nn.Parameter]:
    """Matrices under names by which optimizers know that they belong to a block; with gradients."""
    shapes = {"q": width, "k": width, "v": width, "o": width, "up": 4 * width, "down": 4 * width}
    found = {}
    for name, rows in shapes.items():
        parameter = torch.nn.Parameter(torch.randn(rows, width, device=device))
        parameter.grad = torch.randn_like(parameter)
        found[f"layers.0.attention.{name}"] = parameter
    return found


def _step(optimizer: OptimizerSet, device: torch.device) -> Callable[[], object]:
    """As the training loop calls it: with the verdict on the step, and the divisor that clips gradients."""
    good, scale = torch.zeros((), device=device), torch.ones((), device=device)
    optimizer.set_lr(1e-6)
    return lambda: optimizer.step(found_inf=good, grad_scale=scale)
