"""What an operator costs however small its operands are: the host's part, in eager mode, with gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder

_OPERATORS = 200
_TURNS = 7
_DEPTHS = (2, 10)
_WORDS, _TOKENS, _WIDTH = 64, 8, 32


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


def layer_host_s(device: torch.device) -> float:
    """Seconds of the host for both passes of one layer of a model, plain, with SwiGLU, RMS norms and rotation.

    That is what modules, functions with gradients of their own and views cost beside the operators. Out of two models
    that differ in depth alone, with operands so small that kernels take next to nothing.
    """
    shallow, deep = (_both_passes_s(depth, device) for depth in _DEPTHS)
    return max(deep - shallow, 0.0) / (_DEPTHS[1] - _DEPTHS[0])


def _both_passes_s(layers: int, device: torch.device) -> float:
    config = ModelConfig(
        layers=layers, hidden=_WIDTH, heads=1, activation="swiglu", vocab_size=_WORDS, max_sequence=_TOKENS
    )
    model = Decoder(config, device=device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens_BS = torch.zeros(1, _TOKENS, dtype=torch.int64, device=device)
    clock: Callable[[], float] = time.perf_counter if device.type == "cuda" else time.process_time
    times = []
    for _ in range(_TURNS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began_s = clock()
        model(tokens_BS).sum().backward()
        times.append(clock() - began_s)
    return statistics.median(times[1:])


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
