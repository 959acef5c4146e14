"""The forward and the backward pass of a function, as two cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.checks.calibration.contract import Precision
from phalanx.checks.calibration.stopwatch import Case

_OPERANDS_BYTES = 32 << 20  # that take turns; see `Pool`
_MOST_SETS = 8


def both_ways(
    what: str,
    sizes: Mapping[str, float],
    precision: Precision,
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    make: Callable[[], Sequence[Tensor]],
) -> list[Case]:
    """Cases ``<what>_forward`` and ``<what>_backward``; `make` gives the operands, all of which get gradients."""
    first = make()
    set_bytes = sum(x.numel() * x.element_size() for x in first)
    count = max(1, min(_MOST_SETS, _OPERANDS_BYTES // max(set_bytes, 1)))
    sets = [_with_gradients(x) for x in (first, *(make() for _ in range(count - 1)))]
    forwards = itertools.cycle(sets)
    graphs = itertools.cycle([_graph(function, inputs) for inputs in sets])

    def backward() -> object:
        outputs, inputs, gradients = next(graphs)
        return torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)

    return [
        Case(f"{what}_forward", sizes, precision, lambda: function(*next(forwards))),
        Case(f"{what}_backward", sizes, precision, backward),
    ]


def _with_gradients(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in inputs]


def _graph(function: Callable[..., Any], inputs: list[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return outputs, inputs, [torch.ones_like(x).contiguous() for x in outputs]
