"""What a step does beside its kernels, as cases that are timed: launches, updates, messages, batches.

Launches: what an operator costs however small its operands are: the host's part, in eager mode, with gradients.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from phalanx.checks.calibration.calibration_messages import LAYERS, TINY, Timing
from phalanx.checks.calibration.stopwatch import Case
from phalanx.data.config import DataConfig
from phalanx.data.loader import Loader
from phalanx.data.prepare import prepare
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.optim.build import build_optimizer
from phalanx.optim.config import Kind, OptimConfig
from phalanx.parallel.group import Group

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
        y = x
        for _ in range(_OPERATORS):
            y = y * 1.0
        y.sum().backward()  # type: ignore[no-untyped-call]
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


def updates_cases(widths: tuple[int, ...], device: torch.device) -> list[Case]:
    """The norm and each optimizer's step over the matrices of one layer of each width, 12 D x D in all."""
    found = []
    for width in widths:
        # Matrices under names by which optimizers know that they belong to a block; with gradients.
        shapes = {"q": width, "k": width, "v": width, "o": width, "up": 4 * width, "down": 4 * width}
        parameters = {}
        for name, rows in shapes.items():
            parameter = torch.nn.Parameter(torch.randn(rows, width, device=device))
            parameter.grad = torch.randn_like(parameter)
            parameters[f"layers.0.attention.{name}"] = parameter
        sizes = {"width": width, "parameters": sum(p.numel() for p in parameters.values())}
        for kind in get_args(Kind):
            optimizer = build_optimizer(OptimConfig(name=kind), parameters)
            optimizer.set_lr(1e-6)
            # As the training loop calls it: with the verdict on the step, and the divisor that clips gradients.
            verdict = {"found_inf": torch.zeros((), device=device), "grad_scale": torch.ones((), device=device)}
            found.append(Case(kind, sizes, "fp32", partial(optimizer.step, **verdict)))
        found.append(Case("gradient_norm", sizes, "fp32", optimizer.clip))
    return found


def collectives_cases(sizes_bytes: Sequence[int], group: Group, device: torch.device) -> list[Case]:
    """Each kind for each size of the whole message: gathered, or not yet reduced."""
    found = []
    for num_bytes in sizes_bytes:
        whole = torch.ones(max(1, num_bytes // 4 // group.size) * group.size, device=device)
        part = torch.ones(len(whole) // group.size, device=device)
        sizes = {"num_bytes": 4 * len(whole), "ranks": group.size}
        runs: dict[str, Callable[[], object]] = {
            "all_reduce": _waited(group.all_reduce, torch.zeros_like(whole)),
            "all_gather": _waited(group.all_gather, torch.empty_like(whole), part),
            "reduce_scatter": _waited(group.reduce_scatter, torch.empty_like(part), whole),
            "all_to_all": _waited(group.all_to_all, torch.empty_like(whole), whole),
        }
        found += [Case(kind, sizes, "fp32", run) for kind, run in runs.items()]
        found.append(Case("send", sizes, "fp32", _exchange(group, whole)))
    return found


def _waited(start: Callable[..., object], *tensors: Tensor) -> Callable[[], object]:
    return lambda: start(*tensors).wait()  # type: ignore[attr-defined]


def _exchange(group: Group, x: Tensor) -> Callable[[], object]:
    """Every rank sends to the next one while it receives from the one before, as in a pipeline and in a ring."""
    got = torch.empty_like(x)
    after, before = (group.index + 1) % group.size, (group.index - 1) % group.size

    def run() -> None:
        # NCCL does them in this order: were all to send first, all would wait.
        if group.index % 2:
            receiving = group.receive(got, before)
            sending = group.send(x, after)
        else:
            sending = group.send(x, after)
            receiving = group.receive(got, before)
        receiving.wait()
        sending.wait()

    return run


_TOKENS = 1 << 20
_LENGTH = 512
_FEW, _MANY = 1, 128


def numbers(quick: bool) -> Mapping[str, float]:
    """``loader_step_s``, what a batch takes however small it is, and ``loader_tokens_per_s``, beyond that."""
    with tempfile.TemporaryDirectory(prefix="phalanx-measure-") as folder:
        tokens = np.random.default_rng(0).integers(0, 1000, _TOKENS).astype(np.uint16)
        path = Path(folder) / "train.bin"
        path.write_bytes(tokens.tobytes())
        config = DataConfig.model_validate(
            {
                "folder": f"{folder}/prepared",
                "sequence_length": _LENGTH,
                "validation_fraction": 0.0,
                "tokenizer": {"kind": "none", "vocab_size": 1000},
                "sources": [{"kind": "nanogpt", "path": str(path)}],
            }
        )
        loader = Loader(prepare(config, workers=1), config)

        def median_s(samples: int) -> float:
            times = []
            for turn in range(3 if quick else 15):
                began_s = time.perf_counter()
                loader.batch(turn * samples, samples)
                times.append(time.perf_counter() - began_s)
            return statistics.median(times[1:])

        few_s, many_s = median_s(_FEW), median_s(_MANY)
    token_s = max(many_s - few_s, many_s / 2) / ((_MANY - _FEW) * _LENGTH)
    return {"loader_step_s": max(few_s - _FEW * _LENGTH * token_s, few_s / 10), "loader_tokens_per_s": 1 / token_s}
