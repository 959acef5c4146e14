"""What processes that measure would answer on a machine whose times follow from a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from phalanx.checks.calibration.calibration_messages import Answer, Precision, Timing
from phalanx.model.shapes import mean_keys

PRODUCT_FLOPS_PER_S = 50e9
GRADIENT_FLOPS_PER_S = 80e9
ATTENTION_FLOPS_PER_S = 20e9
MEMORY_BYTES_PER_S = 10e9
HOST_S = 5e-6
LATENCY_S, LINK_BYTES_PER_S = 100e-6, 1e9
TOKENS, WIDTHS = (128, 512, 2048), (128, 384, 1024)
SHAPES = ((512, 384), (2048, 1024))
NUMBERS = {
    "memory_bytes": 16e9,
    "host_launch_s": HOST_S,
    "layer_host_s": 100 * HOST_S,
    "kernel_s": 0.0,
    "kernel_gap_s": 0.0,
    "bf16_flops_per_s": 1e9,
    "loader_step_s": 1e-4,
    "loader_tokens_per_s": 4e7,
    "process_s": 3.0,
    "groups_s": 0.1,
}


def answer(
    ranks: int = 1,
    *,
    slower: float = 1.0,
    seconds_of: Callable[[str], float] | None = None,
    half_s: float = 0.0,
) -> Answer:
    """All that a rank finds.

    Args:
        slower: factor on all that it computes.
        seconds_of: time of a kernel between products by its name; None: what moves a tensor of 8 MiB three times.
        half_s: time of each such kernel with numbers of bf16; 0: nothing is measured with them.
    """
    kernels = seconds_of or (lambda name: 1e-3)
    timings = [*_products("fp32"), *_attention("fp32"), *_kernels("fp32", kernels), *_ends("fp32"), *_updates(kernels)]
    if half_s:
        timings += [*_products("bf16"), *_attention("bf16"), *_kernels("bf16", lambda name: half_s), *_ends("bf16")]
    slowed = [Timing(t.what, t.sizes, t.precision, t.seconds * slower) for t in timings]
    return Answer(
        tuple(slowed + (list(_messages(ranks)) if ranks > 1 else [])), NUMBERS, {"device": "A CPU", "torch": "2"}
    )


def _products(precision: Precision) -> Iterator[Timing]:
    for tokens in TOKENS:
        for rows in WIDTHS:
            for columns in WIDTHS:
                sizes = {"tokens": tokens, "rows": rows, "columns": columns}
                flops = 2.0 * tokens * rows * columns
                # Narrow results are slower, so that rows and columns cannot be taken for each other.
                share = 1.0 if rows >= columns else 0.5
                yield Timing("product", sizes, precision, flops / PRODUCT_FLOPS_PER_S / share)
                yield Timing("weight_gradient", sizes, precision, flops / GRADIENT_FLOPS_PER_S)


def _attention(precision: Precision) -> Iterator[Timing]:
    for size in (32, 64):
        for queries in (128, 512):
            sizes = {"batch": 2, "heads": 6, "queries": queries, "head_dim": size}
            flops = 4.0 * 2 * queries * 6 * size * mean_keys(queries, None)
            yield Timing("attention_forward", sizes, precision, flops / ATTENTION_FLOPS_PER_S)
            yield Timing("attention_backward", sizes, precision, 2.5 * flops / ATTENTION_FLOPS_PER_S)


def _kernels(precision: Precision, seconds_of: Callable[[str], float]) -> Iterator[Timing]:
    for tokens, width in SHAPES:
        sizes = {"tokens": tokens, "width": width}
        for kernel in ("rms_norm", "layer_norm", "swiglu", "gelu", "rotary", "rows"):
            for each in ("forward", "backward"):
                yield Timing(f"{kernel}_{each}", sizes, precision, seconds_of(f"{kernel}_{each}"))
        yield Timing("sum", sizes, precision, 12.0 * tokens * width / MEMORY_BYTES_PER_S + HOST_S)


def _ends(precision: Precision) -> Iterator[Timing]:
    sizes = {"tokens": 1024, "width": 256, "words": 4096}
    yield Timing("embedding_forward", sizes, precision, 1e-3)
    yield Timing("embedding_backward", sizes, precision, 2e-3)
    yield Timing("head", sizes, precision, 30e-3)
    yield Timing("head_products", sizes, precision, 20e-3)


def _updates(seconds_of: Callable[[str], float]) -> Iterator[Timing]:
    sizes = {"width": 384, "parameters": 12 * 384 * 384}
    for kind in ("adamw", "lamb", "came", "muon", "gradient_norm"):
        yield Timing(kind, sizes, "fp32", seconds_of(kind))


def _messages(ranks: int) -> Iterator[Timing]:
    for num_bytes in (1024, 1 << 20, 1 << 25):
        sizes = {"num_bytes": num_bytes, "ranks": ranks}
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
            twice = 2 if kind == "all_reduce" else 1
            yield Timing(kind, sizes, "fp32", LATENCY_S + twice * num_bytes / LINK_BYTES_PER_S)
