"""The kernels of a layer and of both ends of a model, as cases that are timed, forward and backward.

A product of (tokens, columns) with (columns, rows) is made as a layer makes it: projections that widen are stored as
their transpose, those that narrow are not, and with backward passes it is the other way round, so that the sizes alone
say how the weight lies in memory; a square one is made both ways. The kernels between products wait for memory: norms,
activations, rotation, residuals.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.checks.calibration.calibration_messages import ATTENTION_HEADS, HEAD_DIM, Precision
from phalanx.checks.calibration.stopwatch import Case, Pool
from phalanx.kernels.attention import CausalKernel, attention
from phalanx.kernels.attention_trial import KERNELS, Shape, find_fault
from phalanx.kernels.linear import linear, project
from phalanx.kernels.loss import linear_cross_entropy
from phalanx.kernels.masks import AttentionMask
from phalanx.kernels.pointwise import rms_norm
from phalanx.model.rotary import rotate_heads

_OPERANDS_BYTES = 32 << 20  # that take turns; see `Pool`
_MOST_SETS = 8


def both_ways(
    what: str,
    sizes: Mapping[str, float],
    precision: Precision,
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    make: Callable[[], Sequence[Tensor]],
) -> list[Case]:
    """Cases ``<what>_forward`` and ``<what>_backward``; `make` gives the operands, all of which get gradients."""
    first = make()
    set_bytes = sum(x.numel() * x.element_size() for x in first)
    count = max(1, min(_MOST_SETS, _OPERANDS_BYTES // max(set_bytes, 1)))
    sets = [[x.detach().requires_grad_() for x in each] for each in (first, *(make() for _ in range(count - 1)))]
    forwards = itertools.cycle(sets)
    graphs = []
    for inputs in sets:
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        graphs.append((outputs, inputs, [torch.ones_like(x).contiguous() for x in outputs]))
    turns = itertools.cycle(graphs)

    def backward() -> object:
        outputs, inputs, gradients = next(turns)
        return torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)

    return [
        Case(f"{what}_forward", sizes, precision, lambda: function(*next(forwards))),
        Case(f"{what}_backward", sizes, precision, backward),
    ]


_SMALL = 128
_DTYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def products_cases(tokens: tuple[int, ...], widths: tuple[int, ...], precision: Precision, pool: Pool) -> list[Case]:
    """Products and weight gradients for all `tokens`, rows and columns out of `widths`."""
    found = []
    for count in tokens:
        for rows in widths:
            for columns in widths:
                sizes = {"tokens": count, "rows": rows, "columns": columns}
                product, calls = _product(count, rows, columns, pool)
                found.append(Case("product", sizes, precision, product, calls))
                found.append(
                    Case("weight_gradient", sizes, precision, partial(_weight_gradient, count, rows, columns, pool))
                )
    return found


def slow_rates(precisions: Sequence[Precision], device: torch.device) -> dict[str, float]:
    """``<precision>_flops_per_s`` of one small product in each precision that is not among `precisions`."""
    rates = {}
    for precision, dtype in _DTYPES.items():
        if precision not in precisions:
            x = torch.ones(_SMALL, _SMALL, dtype=dtype, device=device)
            torch.mm(x, x)
            began_s = time.perf_counter()
            float(torch.mm(x, x)[0, 0])  # waits for a GPU
            rates[f"{precision}_flops_per_s"] = 2 * _SMALL**3 / (time.perf_counter() - began_s)
    return rates


def _product(tokens: int, rows: int, columns: int, pool: Pool) -> tuple[Callable[[], object], int]:
    def widening() -> torch.Tensor:
        return linear(pool.take(tokens, columns), pool.take(rows, columns))

    def narrowing() -> torch.Tensor:
        return project(pool.take(tokens, columns), pool.take(columns, rows))

    if rows != columns:
        return torch.no_grad()(widening if rows > columns else narrowing), 1
    return torch.no_grad()(lambda: (widening(), narrowing())), 2


@torch.no_grad()
def _weight_gradient(tokens: int, rows: int, columns: int, pool: Pool) -> Tensor:
    return torch.mm(pool.take(tokens, rows).t(), pool.take(tokens, columns))


def attention_cases(
    tokens: int, queries: Sequence[int], head_dims: Sequence[int], precision: Precision, pool: Pool
) -> list[Case]:
    """Forward and backward passes over `tokens` in sequences of each length, at least one of them."""
    found = []
    for size in head_dims:
        for length in queries:
            found += _case(max(1, tokens // length), length, size, precision, pool)
    return found


def _case(batch: int, length: int, size: int, precision: Precision, pool: Pool) -> list[Case]:
    # On a CPU two documents in each sequence, which training keeps apart by default; the mask is made once, as for all
    # layers of a step. On a GPU a kernel would be compiled for each length, which takes longer than all that is
    # measured.
    documents = (torch.arange(length) >= length // 3).int().expand(batch, length)
    mask = AttentionMask(length, length, documents_BS=documents if pool.device.type == "cpu" else None)
    sizes = {"batch": batch, "heads": ATTENTION_HEADS, "queries": length, "head_dim": size}
    kernel = None
    if pool.device.type == "cuda":
        # What a run finds by its trial; without kernels that are compiled for each length.
        shape = Shape(batch, ATTENTION_HEADS, ATTENTION_HEADS, length, size, _DTYPES[precision], "all")
        tried = (name for name in KERNELS if name != "flex" and not find_fault(name, shape, pool.device))
        kernel = CausalKernel(next(tried), shape.length)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask, kernel=kernel)

    def make() -> list[Tensor]:
        stacked = pool.take(batch, length, 3 * ATTENTION_HEADS, size)
        return [x.transpose(1, 2) for x in torch.split(stacked, ATTENTION_HEADS, dim=2)]

    return both_ways("attention", sizes, precision, attend, make)


_EPS = 1e-5


@dataclass(frozen=True)
class _Way:
    """How a function is run, and what its name ends in."""

    suffix: str
    made: Callable[[Any], Any]


_AS_WRITTEN = _Way("", lambda function: function)
_COMPILED = _Way("_compiled", lambda function: torch.compile(function, dynamic=False))


def streams_cases(
    shapes: Sequence[tuple[int, int]], precision: Precision, pool: Pool, wide: Pool, *, compiled: bool = False
) -> list[Case]:
    """All kinds for each (tokens, width); the residual stream comes out of `wide`, what is multiplied out of `pool`.

    Args:
        compiled: the larger half of the shapes as torch.compile makes them, too, under names that end in ``_compiled``.
    """
    found = []
    for number, (tokens, width) in enumerate(shapes):
        sizes = {"tokens": tokens, "width": width}
        for way in (_AS_WRITTEN, _COMPILED) if compiled and 2 * number >= len(shapes) else (_AS_WRITTEN,):
            found += _norms(sizes, precision, wide, way)
            found += _activations(sizes, precision, pool, way)
            found += _heads(sizes, precision, pool, way)
        found.append(Case("sum", sizes, precision, partial(_sum, tokens, width, wide)))
    return found


def _norms(sizes: dict[str, int], precision: Precision, wide: Pool, way: _Way) -> list[Case]:
    tokens, width = sizes["tokens"], sizes["width"]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, None, _EPS).to(dtype)

    def root_mean_square(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, _EPS, dtype)

    def make() -> list[Tensor]:
        return [wide.take(tokens, width), wide.take(width)]

    return [
        *both_ways(f"rms_norm{way.suffix}", sizes, precision, way.made(root_mean_square), make),
        *both_ways(f"layer_norm{way.suffix}", sizes, precision, way.made(layer_norm), make),
    ]


def _activations(sizes: dict[str, int], precision: Precision, pool: Pool, way: _Way) -> list[Case]:
    tokens, width = sizes["tokens"], sizes["width"]

    def gated(stacked: Tensor) -> Tensor:
        gate, up = stacked.chunk(2, dim=1)
        return F.silu(gate) * up

    def gelu(x: Tensor) -> Tensor:
        return F.gelu(x)

    return [
        *both_ways(f"swiglu{way.suffix}", sizes, precision, way.made(gated), lambda: [pool.take(tokens, 2 * width)]),
        *both_ways(f"gelu{way.suffix}", sizes, precision, way.made(gelu), lambda: [pool.take(tokens, width)]),
    ]


def _heads(sizes: dict[str, int], precision: Precision, pool: Pool, way: _Way) -> list[Case]:
    """Rotation of queries and keys; and heads to rows again, which on a CPU is how attention stores them already."""
    tokens, heads = sizes["tokens"], max(1, sizes["width"] // HEAD_DIM)
    angles = torch.rand(tokens, 1, HEAD_DIM // 2, device=pool.device)
    cosines, sines = angles.cos(), angles.sin()

    def rotate(stacked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rotate_heads(stacked, cosines, sines, heads, heads)

    def attended() -> Tensor:
        if pool.device.type == "cpu":
            return pool.take(1, tokens, heads, HEAD_DIM).transpose(1, 2)
        return pool.take(1, heads, tokens, HEAD_DIM)

    def rows(out: Tensor) -> Tensor:
        return out.transpose(1, 2).reshape(tokens, -1)

    def stacked() -> list[Tensor]:
        return [pool.take(1, tokens, 3 * heads, HEAD_DIM)]

    turned = both_ways(f"rotary{way.suffix}", sizes, precision, way.made(rotate), stacked)
    return turned if way.suffix else [*turned, *both_ways("rows", sizes, precision, rows, lambda: [attended()])]


def _sum(tokens: int, width: int, wide: Pool) -> Tensor:
    return wide.take(tokens, width) + wide.take(tokens, width)


def ends_cases(shapes: Sequence[tuple[int, int, int]], precision: Precision, pool: Pool, wide: Pool) -> list[Case]:
    """For each (tokens, width, words): the embedding, the head with its gradients, and the head's products alone."""
    found = []
    for tokens, width, words in shapes:
        sizes = {"tokens": tokens, "width": width, "words": words}
        chosen = torch.randint(words, (tokens,), device=wide.device)
        found += both_ways(
            "embedding", sizes, precision, partial(F.embedding, chosen), partial(_taken, wide, words, width)
        )
        found.append(Case("head", sizes, precision, _head(tokens, width, words, chosen, pool, wide)))
        found.append(Case("head_products", sizes, precision, partial(_head_products, tokens, width, words, pool)))
    return found


def _taken(pool: Pool, *shape: int) -> list[Tensor]:
    return [pool.take(*shape)]


def _head(tokens: int, width: int, words: int, targets: torch.Tensor, pool: Pool, wide: Pool) -> Callable[[], object]:
    """Hidden states so small that logits are as in training: exponentials of large ones are slow, or fast, in vain.

    The weight is cast once per step in training, so before.
    """
    x = (pool.take(tokens, width) / width**0.5).requires_grad_()
    weight = wide.take(words, width).detach().requires_grad_()
    cast = None if x.dtype == weight.dtype else weight.detach().to(x.dtype)

    def run() -> object:
        loss, _ = linear_cross_entropy(x, weight, targets, cast_VD=cast)
        return torch.autograd.grad(loss, (x, weight))

    return run


@torch.no_grad()
def _head_products(tokens: int, width: int, words: int, pool: Pool) -> object:
    x, weight, logits = pool.take(tokens, width), pool.take(words, width), pool.take(tokens, words)
    return torch.mm(x, weight.t()), torch.mm(logits, weight), torch.mm(logits.t(), x)
