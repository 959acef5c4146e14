"""The rate of matrix products: those of the task's own model, forward and backward, and a square one of 1,024.

Best of several times for each, since it stands for what the machine can do. No training loop.
"""

from __future__ import annotations

import json
import time

import torch

from contenders.task import Task


def run(task: Task) -> None:
    torch.set_num_threads(task.threads)
    dtype = torch.bfloat16 if task.precision == "bf16" else torch.float32
    flops = seconds = 0.0
    for rows, inner, columns in shapes(task):
        flops += 2 * rows * inner * columns
        seconds += best_s(rows, inner, columns, dtype)
    square = 2 * 1024**3 / best_s(1024, 1024, 1024, dtype)
    print(json.dumps({"own": flops / seconds, "square": square}))


def shapes(task: Task) -> list[tuple[int, int, int]]:
    """Every product of a step as rows, inner size, columns: of a layer's forward, and of both its gradients."""
    tokens, width = task.batch * task.length, task.hidden
    layers = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    forward = [(tokens, inputs, outputs) for inputs, outputs in layers]
    by_input = [(tokens, outputs, inputs) for inputs, outputs in layers]
    by_weight = [(outputs, tokens, inputs) for inputs, outputs in layers]
    return [*forward, *by_input, *by_weight]


def best_s(rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype)
    best = float("inf")
    for _ in range(40):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - start)
    return best
