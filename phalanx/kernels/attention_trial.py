"""A self-test of an attention kernel at the shape of a run: forward and backward against products in fp32.

Kernels for GPUs have faults that depend on the shape, the version and the values: cuDNN's backward made NaN where a
sequence was 64 longer than a multiple of 128 and all scores of a query were far below zero (pytorch #196678). So a run
tries the kernel that it is going to use, once, with its own shape, and every second query has such scores.

Everything that the kernel made must be finite; the values of two groups of heads, of the first and of
the last sequence, are compared. The reference goes through chunks of queries: its memory grows with the sequence alone.

Shapes: B batch, H query heads, G key/value heads (dividing H), S queries, K keys, E head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.kernels import attention_aten
from phalanx.kernels.attention import CausalKernel, Kernel, attention
from phalanx.kernels.masks import AttentionMask

KERNELS: tuple[Kernel, ...] = ("cudnn", "flash", "flex", "efficient", "math")
"""Kernels for CUDA, the fastest first (figures: docs/kernels.md)."""

Layout = Literal["values", "all", "none", "heads"]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Queries, keys, values and the gradient of the result -> the result, and the gradients of the three."""

_SCORE = -120.0  # below ln of the smallest fp32
_ROUNDINGS = 8
_COARSEST_FP32 = 2.0**-10  # products of fp32 may be made in TF32
_TILE = 128
_REFERENCE_ELEMENTS = 1 << 24  # scores at once: 64 MiB, of which a few are held


@dataclass(frozen=True)
class Shape:
    """Attention as one layer of a run asks for it."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_size: int
    dtype: torch.dtype
    # which of queries, keys and values are views of one stacked tensor, as a layer's projection leaves them; heads:
    # none, and positions lie within heads
    layout: Layout = "values"
    past: int = 0  # keys before those of the queries

    def __str__(self) -> str:
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads} over {self.kv_heads} heads"
        return f"{self.batch} x {self.length:,} positions, {heads} of {self.head_size}"


@dataclass(frozen=True)
class Trial:
    """What is to be tried."""

    shape: Shape
    # attention by a kernel, where that is not a single call of `phalanx.kernels.attention.attention`
    attend: Callable[[Kernel], Attend] | None = None
    kernels: tuple[Kernel, ...] = KERNELS  # that can do it, the fastest first; the last one always can


def find_fault(kernel: Kernel, shape: Shape, device: torch.device, attend: Attend | None = None) -> str:
    """What speaks against `kernel` for `shape`; empty where nothing does. Waits for the device.

    Raises:
        UserError: the kernel has left the device unusable.
        torch.OutOfMemoryError: there is no room for one layer's attention.
    """
    if kernel == "math":  # the reference itself
        return ""
    q, k, v, grad = _tensors(shape, device)
    if device.type == "cuda" and (reason := _refused(kernel, q, k, v)):
        return reason
    try:
        results = (attend or _by(kernel, shape))(q, k, v, grad)
        finite = torch.stack([torch.isfinite(x).all() for x in results]).tolist()
        bad = [name for name, good in zip(_NAMES, finite, strict=True) if not good]
        return f"not finite: {', '.join(bad)}" if bad else _wrong(results, (q, k, v, grad), shape)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a library raises for a shape that it cannot do
        reason = str(error).strip().partition(chr(10))[0]
        try:
            torch.zeros(1, device=device).item()
        except RuntimeError:  # the device's context is broken: no other kernel could run in this process
            others = [name for name in KERNELS if name != kernel]
            raise UserError(
                f"the {kernel} kernel broke the device ({reason})",
                cure=f"set model.attention_backend={others[0] if kernel != 'cudnn' else 'flash'}",
                field="model.attention_backend",
                value="auto",
            ) from error
        return f"{type(error).__name__}: {reason}"


def _refused(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> str:
    if kernel == "cudnn" and torch.are_deterministic_algorithms_enabled():
        return "its backward adds up in any order, and train.deterministic is set"
    return attention_aten.refusal(kernel, q, k, v) if kernel in ("cudnn", "flash") else ""


def _tensors(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and a gradient, laid out as those of a layer; the same in every run."""
    generator = torch.Generator(device).manual_seed(0)
    batch, keys, size = shape.batch, shape.past + shape.length, shape.head_size
    count = [shape.heads, shape.kv_heads, shape.kv_heads]
    stacked = torch.randn(batch, keys, sum(count), size, dtype=shape.dtype, device=device, generator=generator)
    q, k, v = torch.split(stacked, count, dim=2)
    q = q[:, shape.past :]
    q[..., 0] = (torch.arange(shape.length, device=device) % 2)[:, None].to(shape.dtype)
    k[..., 0] = _SCORE * size**0.5
    if shape.layout != "all":
        q, k = q.contiguous(), k.contiguous()
    if shape.layout in ("none", "heads"):
        v = v.contiguous()
    grad = torch.randn(batch, shape.length, shape.heads, size, dtype=shape.dtype, device=device, generator=generator)
    made = [x.transpose(1, 2) for x in (q, k, v, grad)]
    q, k, v, grad = (x.contiguous() for x in made) if shape.layout == "heads" else made
    return q, k, v, grad


def _by(kernel: Kernel, shape: Shape) -> Attend:
    chosen, mask = CausalKernel(kernel, shape.length), AttentionMask(shape.length, shape.past + shape.length)

    def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mask=mask, kernel=chosen)
        if shape.layout == "heads":
            dq, dk, dv = torch.autograd.grad(out, leaves, grad)
        else:
            rows, grad_rows = (x.transpose(1, 2).flatten(2) for x in (out, grad))
            dq, dk, dv = torch.autograd.grad(rows, leaves, grad_rows)
        return out.detach(), dq, dk, dv

    return attend


_NAMES = ("output", "gradient of queries", "gradient of keys", "gradient of values")


def _wrong(results: tuple[Tensor, ...], given: tuple[Tensor, ...], shape: Shape) -> str:
    worst = torch.zeros(4, device=given[0].device)
    group = shape.heads // shape.kv_heads
    for sample, head in {(0, 0), (shape.batch - 1, shape.kv_heads - 1)}:
        queries = slice(head * group, (head + 1) * group)
        q, k, v, grad = given
        expected = reference(q[sample, queries], k[sample, head], v[sample, head], grad[sample, queries])
        out, dq, dk, dv = results
        got = (out[sample, queries], dq[sample, queries], dk[sample, head], dv[sample, head])
        errors = [_distance(a, b, index) for index, (a, b) in enumerate(zip(got, expected, strict=True))]
        worst = torch.maximum(worst, torch.stack(errors))
    bound = _ROUNDINGS * max(torch.finfo(shape.dtype).eps, _COARSEST_FP32)
    bad = [f"{name} by {error:.0%}" for name, error in zip(_NAMES, worst.tolist(), strict=True) if not error <= bound]
    return f"further than {bound:.0%} from the reference: {', '.join(bad)}" if bad else ""


def _distance(got: Tensor, expected: Tensor, index: int) -> Tensor:
    """The largest distance of a row from the row expected, as a share of its length and of the mean one nearby.

    Nearby, since a sequence's first rows are many times longer than its last ones, and rounded accordingly. The first
    column of the queries' gradient is left out: there the large column of the keys magnifies all rounding.
    """
    got = got.float()
    if index == 1:
        got, expected = got[..., 1:], expected[..., 1:]
    lengths = expected.norm(dim=-1).reshape(-1, expected.shape[-2])
    nearby = F.avg_pool1d(lengths, _TILE, ceil_mode=True).repeat_interleave(_TILE, dim=1)[:, : lengths.shape[1]]
    errors: Tensor = (got - expected).norm(dim=-1) / (lengths + nearby)
    return errors.max()


def reference(q_HSE: Tensor, k_KE: Tensor, v_KE: Tensor, grad_HSE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention of the heads of one group, in fp32: the result, and the gradients of queries, keys and values.

    The queries are the last S positions of the keys.
    """
    q, k, v, grad = (x.float() for x in (q_HSE, k_KE, v_KE, grad_HSE))
    out, dq, dk, dv = torch.empty_like(q), torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    heads, length, size = q.shape
    scale, past = size**-0.5, len(k) - length
    chunk = max(1, _REFERENCE_ELEMENTS // (heads * len(k)))
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        seen = past + end  # keys, of the last of these queries
        here, keys, values = slice(begin, end), k[:seen], v[:seen]
        later = torch.arange(seen, device=q.device) > torch.arange(past + begin, seen, device=q.device)[:, None]
        scores = (q[:, here] @ keys.T * scale).masked_fill_(later, float("-inf"))
        weights = scores.softmax(dim=-1)
        out[:, here] = weights @ values
        change = grad[:, here] @ values.T
        change = weights * (change - (change * weights).sum(-1, keepdim=True)) * scale
        dq[:, here] = change @ keys
        dk[:seen] += change.flatten(0, 1).T @ q[:, here].flatten(0, 1)
        dv[:seen] += weights.flatten(0, 1).T @ grad[:, here].flatten(0, 1)
    return out, dq, dk, dv
