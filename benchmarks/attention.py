"""Attention forward and backward, on a CPU and on a GPU.

    python benchmarks/attention.py [--threads 1] [--repeats 7] [--json FILE]
    python benchmarks/attention.py --device cuda [--repeats 20] [--json FILE]

**On a GPU**: every kernel at the shapes of `SHAPES`, plain causal and with documents: what its self-test found, the
median milliseconds of forward and backward together, and TFLOP/s of 3.5 x 2 B H S^2 E (causal: half of all pairs; with
documents the same count, so that it can be compared). Variable-length attention is torch's, for comparison alone.

**On a CPU**: pairs in one run, medians of ratios.
Every case runs torch's own causal ``scaled_dot_product_attention`` and ours in turns, so that both see the same
machine; the figure is the median over turns of the ratio of their times. CPU seconds are taken on one thread, wall
seconds on more.
"""

from __future__ import annotations

import inspect
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from support.harness import benchmark_parser, clock_for, in_turns, ratio, timer, write_json
from torch import Tensor

from phalanx.kernels.attention import Backend, attention
from phalanx.kernels.attention_trial import KERNELS, Shape, find_fault
from phalanx.kernels.host_memory import keep_freed_memory
from phalanx.kernels.masks import AttentionMask


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    length: int
    head_size: int
    window: int | None
    dtype: str


CASES = tuple(
    Case(*shape, dtype)
    for dtype in ("float32", "bfloat16")
    for shape in (
        (12, 4, 64, 32, None),
        (8, 6, 256, 64, None),
        (4, 6, 512, 64, None),
        (2, 6, 1024, 64, None),
        (1, 8, 2048, 64, 256),
        (1, 8, 4096, 64, 256),
    )
)


SHAPES = {
    "llama-8b": Shape(2, 32, 8, 8192, 128, torch.bfloat16),
    "llama-1.3b": Shape(8, 16, 16, 2048, 128, torch.bfloat16),
    "gpt2-124m": Shape(32, 12, 12, 1024, 64, torch.bfloat16),
    "64 past a multiple of 128": Shape(8, 16, 4, 1984, 128, torch.bfloat16),
}
_DOCUMENTS = 7  # in each sequence, of equal lengths


def gpu_rows(repeats: int) -> list[dict[str, object]]:
    """Every kernel at every shape on the current CUDA device."""
    rows = []
    for name, shape in SHAPES.items():
        for kernel in KERNELS:
            if kernel == "math" and shape.length > 4096:
                continue  # all scores, several times
            rows.append(_gpu_row(name, shape, kernel, _by_backend(shape, kernel), repeats))
        rows.append(_gpu_row(name, shape, "flex, documents", _by_backend(shape, "flex", documents=True), repeats))
        rows.append(_gpu_row(name, shape, "varlen, documents", _by_varlen(shape), repeats))
    return rows


def _gpu_row(name: str, shape: Shape, kernel: str, step: Callable[[], object], repeats: int) -> dict[str, object]:
    device = torch.device("cuda", torch.cuda.current_device())
    row: dict[str, object] = {"shape": name, "kernel": kernel}
    if kernel in KERNELS:
        row["self-test"] = find_fault(kernel, shape, device) or "passed"  # type: ignore[arg-type]
    try:
        milliseconds = _gpu_ms(step, repeats)
        pairs = shape.batch * shape.heads * shape.length**2
        row |= {"ms": round(milliseconds, 3), "TFLOP/s": round(3.5 * 2 * pairs * shape.head_size / milliseconds / 1e9)}
    except (RuntimeError, TypeError, ValueError, ImportError) as error:
        row["error"] = str(error).partition("\n")[0]
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    torch.cuda.empty_cache()
    return row


def _gpu_ms(step: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _gpu_tensors(shape: Shape) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values (B, S, heads, E) that need gradients, and a gradient of the result."""
    counts = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    sizes = [(shape.batch, shape.length, count, shape.head_size) for count in counts]
    q, k, v, grad = (torch.randn(size, dtype=shape.dtype, device="cuda") for size in sizes)
    return [x.requires_grad_() for x in (q, k, v)], grad


def _by_backend(shape: Shape, backend: Backend, *, documents: bool = False) -> Callable[[], object]:
    leaves, grad = _gpu_tensors(shape)
    numbers = torch.arange(shape.length, device="cuda") // -(-shape.length // _DOCUMENTS)
    documents_BS = numbers.expand(shape.batch, -1).int() if documents else None
    mask = AttentionMask(shape.length, shape.length, documents_BS=documents_BS)

    def step() -> object:
        out = attention(*(x.transpose(1, 2) for x in leaves), mask=mask, backend=backend)
        return torch.autograd.grad(out, leaves, grad.transpose(1, 2))

    return step


def _by_varlen(shape: Shape) -> Callable[[], object]:
    """torch's attention over sequences of any lengths, one after the other: the same documents."""

    def step() -> object:
        from torch.nn.attention.varlen import varlen_attn

        longest = -(-shape.length // _DOCUMENTS)
        begins = torch.arange(0, shape.length, longest, device="cuda", dtype=torch.int32)
        rows = torch.arange(shape.batch, device="cuda", dtype=torch.int32)[:, None] * shape.length + begins
        ends = torch.cat([rows.flatten(), rows.new_tensor([shape.batch * shape.length])])
        options: dict[str, object] = {"enable_gqa": shape.heads != shape.kv_heads, "window_size": (-1, 0)}
        known = inspect.signature(varlen_attn).parameters
        options = {name: value for name, value in options.items() if name in known}
        if "is_causal" in known:  # as older versions of torch have it
            options["is_causal"] = True
        out = varlen_attn(*(x.flatten(0, 1) for x in leaves), ends, ends, longest, longest, **options)
        return torch.autograd.grad(out, leaves, grad.flatten(0, 1))

    leaves, grad = _gpu_tensors(shape)
    return step


def steps(case: Case) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward and backward of full causal attention by torch, and of the case by us."""
    dtype = getattr(torch, case.dtype)
    shape = (case.batch, case.length, case.heads, case.head_size)
    q, k, v = (torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    grad = torch.randn(shape, dtype=dtype).transpose(1, 2)
    mask = AttentionMask(case.length, case.length, window=case.window)

    def theirs() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

    def ours() -> object:
        return torch.autograd.grad(attention(q, k, v, mask=mask), (q, k, v), grad)

    return theirs, ours


def measure(case: Case, repeats: int, clock: Callable[[], float]) -> dict[str, object]:
    theirs, ours = steps(case)
    taken_s = in_turns({"sdpa": timer(theirs, clock), "ours": timer(ours, clock)}, repeats)
    return asdict(case) | {
        "sdpa_ms": round(1e3 * statistics.median(taken_s["sdpa"]), 3),
        "ours_ms": round(1e3 * statistics.median(taken_s["ours"]), 3),
        "speedup": round(ratio(taken_s["sdpa"], taken_s["ours"]), 2),
    }


def main() -> None:
    parser = benchmark_parser(__doc__, quick="one repeat, to see that it works", repeats=7, as_json=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    options.repeats = 1 if options.quick else options.repeats
    if options.device == "cuda":
        if not torch.cuda.is_available():
            print("no CUDA device is visible: nothing was measured")
            return
        print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {torch.cuda.get_device_name()}")
        write_json(options.json, gpu_rows(options.repeats))
        return
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    clock = clock_for(options.threads)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {options.threads} thread(s)")
    rows = []
    for case in CASES:
        rows.append(row := measure(case, options.repeats, clock))
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
