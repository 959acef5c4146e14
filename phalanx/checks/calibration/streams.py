"""The kernels between matrix products, which wait for memory: norms, activations, rotation, residuals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.checks.calibration.both_ways import both_ways
from phalanx.checks.calibration.contract import HEAD_DIM, Precision
from phalanx.checks.calibration.stopwatch import Case, Pool
from phalanx.kernels.norm import rms_norm
from phalanx.model.rotary import rotate_heads

_EPS = 1e-5


@dataclass(frozen=True)
class _Way:
    """How a function is run, and what its name ends in."""

    suffix: str
    made: Callable[[Any], Any]


_AS_WRITTEN = _Way("", lambda function: function)
_COMPILED = _Way("_compiled", lambda function: torch.compile(function, dynamic=False))


def cases(
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
        found.append(Case("sum", sizes, precision, _sum(tokens, width, wide)))
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


def _sum(tokens: int, width: int, wide: Pool) -> Callable[[], object]:
    return lambda: wide.take(tokens, width) + wide.take(tokens, width)
