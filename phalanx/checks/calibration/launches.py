"""What an operator costs however small its operands are: the host's part, in eager mode, with gradients."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.checks.calibration.contract import LAYERS, TINY, Timing
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder

_OPERATORS = 200
_TURNS = 7
_LAYER_TURNS = 12
_DEPTHS = (1, 5)
_WORDS = 64


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


def compiles(device: torch.device) -> bool:
    """Whether layers are compiled in a run here: on a GPU where what torch.compile needs is there.

    What is lacking is said on stderr. Every shape is compiled for itself, so the compiler is allowed many.
    """
    if device.type != "cuda":
        return False
    torch._dynamo.config.recompile_limit = 256
    try:
        torch.compile(lambda x: x + 1.0)(torch.ones(16, device=device))
    except Exception as error:  # of Triton, a C compiler, or what these need
        print(f"compiled kernels are not measured: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True


def layer_host_s(device: torch.device, *, compiled: bool = False) -> float:
    """Seconds of the host for both passes of one layer of a model, plain, with SwiGLU, RMS norms and rotation.

    Operands are so small that kernels take next to nothing: it is what modules, functions with gradients of their own
    and views cost beside the operators.
    """
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    return _layer_s(device, *TINY, clock, compiled=compiled)


def layers(device: torch.device) -> list[Timing]:
    """Both passes of such layers on a CPU, which has other threads.

    They fall asleep between kernels and have to be woken, as no kernel by itself shows.
    """
    return [
        Timing("layer", {"sequences": b, "length": s, "width": w}, "fp32", _layer_s(device, b, s, w, time.perf_counter))
        for b, s, w in (LAYERS if device.type == "cpu" else ())
    ]


def _layer_s(
    device: torch.device,
    sequences: int,
    length: int,
    width: int,
    clock: Callable[[], float],
    *,
    compiled: bool = False,
) -> float:
    """By how much a model with more layers takes longer: at their quickest, since other work on the host would be
    taken for the layers'."""
    shallow, deep = (_model(device, layers, length, width) for layers in _DEPTHS)
    for model in (shallow, deep) if compiled else ():
        model.compile()
    tokens_BS = torch.zeros(sequences, length, dtype=torch.int64, device=device)
    pairs = [[_both_passes_s(model, tokens_BS, clock) for model in (shallow, deep)] for _ in range(_LAYER_TURNS)]
    less_s, more_s = (min(pair[n] for pair in pairs) for n in (0, 1))
    return max(more_s - less_s, 0.0) / (_DEPTHS[1] - _DEPTHS[0])


def _model(device: torch.device, layers: int, length: int, width: int) -> Decoder:
    config = ModelConfig(
        layers=layers,
        hidden=width,
        heads=max(1, width // 64),
        activation="swiglu",
        mlp_hidden=width,
        vocab_size=_WORDS,
        max_sequence=length,
    )
    model = Decoder(config, device=device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def _both_passes_s(model: Decoder, tokens_BS: Tensor, clock: Callable[[], float]) -> float:
    if tokens_BS.is_cuda:
        torch.cuda.synchronize(tokens_BS.device)
    began_s = clock()
    model(tokens_BS).sum().backward()
    return clock() - began_s


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
