"""What an operator costs however small its operands are: the host's part, in eager mode, with gradients."""

from __future__ import annotations

import time

import torch
from torch import Tensor

_OPERATORS = 200
_TURNS = 7


def host_launch_s(device: torch.device) -> float:
    """Seconds of the host for one operator, forward and backward taken together; the median of several turns.

    On a GPU the host runs ahead, so its own clock counts and the device is not waited for. Operands are too small for
    several threads, so what this process has of its cores counts.
    """
    x = torch.ones(16, device=device, requires_grad=True)
    times = []
    for _ in range(_TURNS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began_s = time.process_time()
        _chain(x).backward()  # type: ignore[no-untyped-call]
        times.append((time.process_time() - began_s) / (2 * _OPERATORS))
    return sorted(times)[_TURNS // 2]


def kernel_numbers(device: torch.device) -> dict[str, float]:
    """``kernel_s``, of a kernel that does next to nothing, with the gap before it; on a CPU that is the host's own."""
    if device.type == "cpu":
        return {"kernel_s": 0.0, "kernel_gap_s": 0.0}
    x, graph = torch.ones(16, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # so that the host's time is out of it
        for _ in range(_OPERATORS):
            x.mul_(1.0)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return {"kernel_s": begin.elapsed_time(end) / 1e3 / _OPERATORS, "kernel_gap_s": 0.0}


def _chain(x: Tensor) -> Tensor:
    for _ in range(_OPERATORS):
        x = x * 1.0
    return x.sum()
