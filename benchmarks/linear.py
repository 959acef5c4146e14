"""Products of linear layers in fp32 on a CPU: oneDNN against MKL, which `phalanx.kernels.linear` chooses between.

    python benchmarks/linear.py [--threads 1] [--repeats 11] [--shapes 768x128x384 …]

A shape is rows x inputs x outputs. Its four products (``x @ W.T`` in either library, the same with a residual added)
take turns over operands that together are larger than the caches, as in a training step; ratios are medians over
turns, below 1 where oneDNN is faster. CPU time on one thread, wall time on more: that needs an idle machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from support.harness import benchmark_parser, clock_for, in_turns, ratio, timer
from torch import Tensor

from phalanx.kernels.linear import operators

# Of nanoGPT's small and middle models, of wider ones, and of few rows.
SHAPES = (
    *("768x128x128", "768x128x384", "768x128x512", "768x384x128", "768x512x128"),
    *("2048x384x384", "2048x384x1152", "2048x384x1536", "2048x1536x384"),
    *("4096x256x256", "4096x1024x256", "1024x768x3072", "1024x3072x768"),
    *("64x128x128", "256x128x512", "64x384x384", "32x1024x1024"),
)
OPERANDS_BYTES = 48 << 20
MULTIPLICATIONS = 150_000_000  # of one turn and thread

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def products() -> dict[str, Product]:
    """The contenders: x (T, I), weight as a view (O, I), residual (T, O)."""
    plain, binary = operators()
    return {
        "oneDNN": lambda x, w, _: plain(x, w, None, "none", [], ""),
        "MKL": lambda x, w, _: torch.mm(x, w.t()),
        "oneDNN + residual": lambda x, w, r: binary(x, r, w, None, "add"),
        "MKL + residual": lambda x, w, r: torch.addmm(r, x, w.t()),
    }


def operands(rows: int, inputs: int, outputs: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    set_bytes = 4 * (rows * inputs + inputs * outputs + rows * outputs)
    count = max(2, OPERANDS_BYTES // set_bytes)
    shapes = [(rows, inputs), (inputs, outputs), (rows, outputs)]
    sets = [[torch.randn(shape) for shape in shapes] for _ in range(min(count, 32))]
    return [(x, weight.t(), residual) for x, weight, residual in sets]


def measure(shape: str, threads: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds of each product in every turn; the order rotates, and the first turn warms up."""
    rows, inputs, outputs = (int(size) for size in shape.split("x"))
    sets = operands(rows, inputs, outputs)
    calls = max(1, MULTIPLICATIONS * threads // (rows * inputs * outputs))

    def one_turn(product: Product) -> None:
        for call in range(calls):
            product(*sets[call % len(sets)])

    clock = clock_for(threads)
    contenders = {name: timer(partial(one_turn, product), clock) for name, product in products().items()}
    seconds = in_turns(contenders, repeats)
    return {name: [1e6 * taken / calls for taken in times] for name, times in seconds.items()}


def main() -> None:
    parser = benchmark_parser(__doc__, quick="one turn, to see that it works", repeats=11)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    options = parser.parse_args()
    if not operators():
        print("this torch has no oneDNN: nothing to compare")
        return
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), load {os.getloadavg()[0]:.1f}; least us, ratios\n")
    print("| rows x inputs x outputs | oneDNN | MKL | ratio | with residual: oneDNN | MKL | ratio |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    with torch.no_grad():
        for shape in options.shapes:
            a, b, c, d = measure(shape, options.threads, 1 if options.quick else options.repeats).values()
            print(
                f"| {shape} | {min(a):.0f} | {min(b):.0f} | {ratio(a, b):.2f} | {min(c):.0f} | {min(d):.0f} | "
                f"{ratio(c, d):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
