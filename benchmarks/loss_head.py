"""The loss head, forward and backward: whole logits by plain torch, chunks in plain torch, and the Triton kernels.

    python benchmarks/loss_head.py                       # on a GPU: the shapes of docs/kernels.md
    python benchmarks/loss_head.py --device cpu --quick  # small ones, without Triton

All forms run in turn, so that all see the same machine. Time is the median of the turns; memory is the most that was
taken beyond what lay there before (accelerators only); *products* are the three matrix products of the head alone,
below which nothing can come.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from unittest.mock import patch

import torch
from support.harness import benchmark_parser, write_json
from torch import Tensor

from phalanx.kernels import loss as loss_kernels
from phalanx.kernels.loss import linear_cross_entropy, plain_linear_cross_entropy


@dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    words: int
    width: int


GPU_SHAPES = (
    Shape("gpt2-124m", 32_768, 50_304, 768),
    Shape("llama-1.3b", 16_384, 32_000, 2048),
    Shape("llama-8b-4-layers", 16_384, 128_256, 4096),
)
CPU_SHAPES = (Shape("small", 3072, 4096, 384),)


@contextmanager
def reference() -> Iterator[None]:
    """Chunks in plain torch, on a GPU too."""
    with patch.object(loss_kernels, "twin", return_value=None):
        yield


def forms(shape: Shape, device: torch.device) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    x = torch.randn(shape.tokens, shape.width, device=device).bfloat16().requires_grad_()
    weight = torch.randn(shape.words, shape.width, device=device).mul_(shape.width**-0.5).requires_grad_()
    targets = torch.randint(shape.words, (shape.tokens,), device=device)
    ones = torch.ones(shape.tokens, device=device)

    def gradients(loss: Tensor) -> object:
        return torch.autograd.grad(loss, (x, weight))

    def plain() -> object:
        return gradients(plain_linear_cross_entropy(x, weight, targets, ones, 0.0, 0.0, shape.words)[0])

    def chunks() -> object:
        with reference():
            return gradients(linear_cross_entropy(x, weight, targets)[0])

    def fused() -> object:
        return gradients(linear_cross_entropy(x, weight, targets)[0])

    @torch.no_grad()
    def products() -> None:
        cast = weight.bfloat16()
        for rows in x.split(4096):
            logits = rows @ cast.t()
            _ = logits @ cast, logits.t() @ rows

    found = {"products": products, "plain": plain, "chunks": chunks}
    return found | ({"triton": fused} if loss_kernels.twin(x) is not None else {})


def measure(run: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds, and bytes taken at the most."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if is_gpu else 0
    start_s = time.perf_counter()
    run()
    if is_gpu:
        torch.cuda.synchronize()
    taken_s = time.perf_counter() - start_s
    return taken_s, (torch.cuda.max_memory_allocated() if is_gpu else 0) - before


def table(shape: Shape, device: torch.device, repeats: int) -> Iterator[dict[str, object]]:
    """A row for each form; one that does not fit into memory says so."""
    runs = forms(shape, device)
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name in list(runs):
            try:
                one = measure(runs[name], device)
            except torch.OutOfMemoryError:
                del runs[name]
                continue
            if turn:
                taken[name].append(one)
    for name, found in taken.items():
        row: dict[str, object] = asdict(shape) | {"form": name}
        if not found:
            yield row | {"ms": None, "memory_mib": None}
            continue
        ms = 1e3 * statistics.median(taken_s for taken_s, _ in found)
        yield row | {"ms": round(ms, 2), "memory_mib": max(num_bytes for _, num_bytes in found) >> 20}


def main() -> None:
    parser = benchmark_parser(__doc__, quick="one repeat, to see that it works", repeats=10, as_json=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {name}; bf16 products over an fp32 weight")
    rows = []
    for shape in GPU_SHAPES if device.type == "cuda" else CPU_SHAPES:
        for row in table(shape, device, 1 if options.quick else options.repeats):
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
