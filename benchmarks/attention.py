"""Attention forward and backward on a CPU: pairs in one run, medians of ratios.

    python benchmarks/attention.py [--threads 1] [--repeats 7] [--json FILE]

Every case runs torch's own causal ``scaled_dot_product_attention`` and ours in turns, so that both see the same
machine; the figure is the median over turns of the ratio of their times. CPU seconds are taken on one thread, wall
seconds on more.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from phalanx.kernels.attention import attention
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


def seconds(step: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    step()
    return clock() - start


def measure(case: Case, repeats: int, clock: Callable[[], float]) -> dict[str, object]:
    theirs, ours = steps(case)
    theirs(), ours()
    pairs = [(seconds(theirs, clock), seconds(ours, clock)) for _ in range(repeats)]
    return asdict(case) | {
        "sdpa_ms": round(1e3 * statistics.median(a for a, _ in pairs), 3),
        "ours_ms": round(1e3 * statistics.median(b for _, b in pairs), 3),
        "speedup": round(statistics.median(a / b for a, b in pairs), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--quick", action="store_true", help="one repeat, to see that it works")
    options = parser.parse_args()
    options.repeats = 1 if options.quick else options.repeats
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    clock = time.process_time if options.threads == 1 else time.perf_counter
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {options.threads} thread(s)")
    rows = []
    for case in CASES:
        rows.append(row := measure(case, options.repeats, clock))
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
