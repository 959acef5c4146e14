"""Tokens per second, MFU and memory of training steps on one CUDA device, beside the device's own GEMM rate.

    python benchmarks/train_gpu.py                                  # 124M, 1.3B and four layers of an 8B model
    python benchmarks/train_gpu.py --shapes gpt2-124m --no-compile --json out.json
    python benchmarks/train_gpu.py --fp8 0                          # products of blocks in 8 bits; MFU of the bf16 peak

A step is forward, backward, gradient norm, bad-step verdict and fused AdamW, as in the training loop, on random tokens
that are on the device already. bf16 matrix products with fp32 master weights. The first steps (compilation) are left
out; the median of the rest is taken. Without a CUDA device it says so and ends. `--device cpu --shapes tiny` runs the
same code on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from phalanx.core import units
from phalanx.core.hardware import table_peak
from phalanx.data.batch import Batch
from phalanx.model.config import ModelConfig
from phalanx.model.decoder import Decoder
from phalanx.model.init import initialise
from phalanx.model.logical import LogicalParameters
from phalanx.model.shapes import flops_per_token, num_parameters
from phalanx.optim.bad_step import BadStepJudge
from phalanx.optim.build import build_optimizer
from phalanx.optim.config import BadStepConfig, OptimConfig
from phalanx.train.accumulate import accumulate_gradients
from phalanx.train.device import Device


@dataclass(frozen=True)
class Shape:
    """A model and how much of it goes through the device at once."""

    model: ModelConfig
    batch: int
    length: int


SHAPES = {
    "tiny": Shape(ModelConfig(vocab_size=512, layers=2, hidden=64, heads=2, max_sequence=64), 2, 64),
    "gpt2-124m": Shape(
        ModelConfig(
            vocab_size=50304,
            layers=12,
            hidden=768,
            heads=12,
            max_sequence=1024,
            position="learned",
            norm="layer",
            activation="gelu_tanh",
            tie_embeddings=True,
        ),
        32,
        1024,
    ),
    "llama-1.3b": Shape(ModelConfig(vocab_size=32000, layers=24, hidden=2048, heads=16, max_sequence=2048), 8, 2048),
    "llama-8b-4-layers": Shape(
        ModelConfig(
            vocab_size=128256,
            layers=4,
            hidden=4096,
            heads=32,
            kv_heads=8,
            mlp_hidden=14336,
            max_sequence=8192,
            rope_theta=500000.0,
        ),
        2,
        8192,
    ),
}


@dataclass(frozen=True)
class Result:
    """What one shape reached; `gemm_share` is the rate over that of large GEMMs measured in the same run."""

    shape: str
    parameters: int
    tokens_per_step: int
    step_s: float
    tokens_per_s: float
    flops_per_s: float
    mfu: float | None
    gemm_share: float
    peak_memory_bytes: int
    first_step_s: float


def measured_s(device: Device, work: Callable[[], object]) -> float:
    """Wall time of `work` with the device's queue empty before and after."""
    device.synchronize()
    start_s = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - start_s


def gemm_flops_per_s(device: Device) -> float:
    """Rate of a large square product in the compute type: what a step could reach at best."""
    size = 8192 if device.torch_device.type == "cuda" else 1024
    left = torch.randn(size, size, device=device.torch_device, dtype=device.compute_dtype)
    times_s = [measured_s(device, lambda: torch.mm(left, left)) for _ in range(12)]
    return 2 * size**3 / statistics.median(times_s[2:])


def run(
    name: str, shape: Shape, device: Device, *, compiled: bool, steps: int, gemm: float, bf16_ends: int | None = None
) -> Result:
    """Train `shape` for some steps; in 8 bits but for so many blocks at both ends, if a number is given."""
    if device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    fp8_layers = range(0) if bf16_ends is None else range(bf16_ends, shape.model.layers - bf16_ends)
    model = Decoder(shape.model, device=device.torch_device, compute_dtype=device.compute_dtype, fp8_layers=fp8_layers)
    initialise(model, 0)
    model.hold_casts()
    if compiled:
        model.compile()
    parameters = LogicalParameters(model)
    optimizer = build_optimizer(OptimConfig(lr=1e-4), parameters)
    judge = BadStepJudge(BadStepConfig(), device.torch_device)
    batch = random_batch(shape, device)

    def step() -> None:
        loss = accumulate_gradients(model, batch, micro_batch=shape.batch, device=device, seed=0, step=0)
        parameters.bind_gradients()
        norm, scale = optimizer.clip()
        optimizer.step(found_inf=judge.judge(loss, norm), grad_scale=scale)
        model.weights_changed()
        model.zero_grad(set_to_none=True)
        parameters.bind_gradients()

    times_s = [measured_s(device, step) for _ in range(steps + 3)]
    step_s = statistics.median(times_s[3:])
    tokens = shape.batch * shape.length
    flops_per_s = tokens / step_s * flops_per_token(shape.model, shape.length).total
    peak = table_peak(device.name, bf16=device.compute_dtype == torch.bfloat16)
    return Result(
        shape=name,
        parameters=num_parameters(shape.model),
        tokens_per_step=tokens,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        flops_per_s=flops_per_s,
        mfu=None if peak is None else flops_per_s / peak.flops_per_s,
        gemm_share=flops_per_s / gemm,
        peak_memory_bytes=device.memory_in_use_bytes(),
        first_step_s=times_s[0],
    )


def random_batch(shape: Shape, device: Device) -> Batch:
    """Tokens that mean nothing; arithmetic does not care."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.length + 1)
    tokens = torch.randint(0, shape.model.vocab_size, size, generator=generator)
    batch = Batch(
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        torch.ones(shape.batch, shape.length),
        None,
        torch.arange(shape.batch),
    )
    return batch.to(device.torch_device)


def print_table(results: list[Result], device: Device, gemm: float) -> None:
    title = f"{device.name}, torch {torch.__version__}; large GEMM: {gemm / 1e12:.1f} TFLOP/s"
    table = Table(title=title, title_justify="left")
    for column in ("shape", "parameters", "tokens/step", "step", "tokens/s", "TFLOP/s", "MFU", "of GEMM", "memory"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for result in results:
        table.add_row(
            result.shape,
            units.count(result.parameters),
            f"{result.tokens_per_step:,}",
            units.duration(result.step_s),
            f"{result.tokens_per_s:,.0f}",
            f"{result.flops_per_s / 1e12:.2f}",
            "n/a" if result.mfu is None else f"{result.mfu:.1%}",
            f"{result.gemm_share:.1%}",
            units.size(result.peak_memory_bytes),
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=[n for n in SHAPES if n != "tiny"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--fp8", type=int, metavar="N", help="products in 8 bits; N first and N last blocks in bf16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--quick", action="store_true", help="few steps")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is visible: nothing was measured (--device cpu --shapes tiny runs the code on a CPU)")
        return
    if arguments.device == "cuda":
        torch.set_float32_matmul_precision("high")
        where = torch.device("cuda", torch.cuda.current_device())
        device = Device(where, torch.cuda.get_device_name(where), torch.bfloat16, torch.get_num_threads())
    else:
        device = Device(torch.device("cpu"), "CPU", torch.float32, torch.get_num_threads())
    gemm = gemm_flops_per_s(device)
    steps = 3 if arguments.quick else arguments.steps
    results = [
        run(name, SHAPES[name], device, compiled=arguments.compile, steps=steps, gemm=gemm, bf16_ends=arguments.fp8)
        for name in arguments.shapes
    ]
    print_table(results, device, gemm)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
