"""Operations to seconds on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.plan.hardware.device import Device
from phalanx.plan.hardware.either import any_array
from phalanx.plan.types import Floats, Precision, Recompute
from phalanx.plan.work.operations import Attend, Operation, Passes, Product, Stream

_BACKWARD_ATTENTION = 2.5
"""FLOPs of fused attention's backward pass over its forward pass: five products instead of two (arXiv 2205.14135)."""


@dataclass(frozen=True)
class Timed:
    """Seconds of a set of operations by path, and the kernels that the host launches for them, by pass."""

    by_path: Mapping[str, Passes]
    launches: Passes

    @property
    def total(self) -> Passes:
        """All paths together."""
        return Passes.sum(self.by_path.values())


def timed(operations: Sequence[Operation], device: Device, precision: Precision, recompute: Recompute) -> Timed:
    """What `operations` take on `device`, one kernel after another."""
    by_path: dict[str, Passes] = {}
    for path, passes in (
        *_products([o for o in operations if isinstance(o, Product)], device, precision, recompute),
        *_attends([o for o in operations if isinstance(o, Attend)], device, precision, recompute),
        *_streams([o for o in operations if isinstance(o, Stream)], device, precision, recompute),
    ):
        by_path[path] = by_path[path] + passes if path in by_path else passes
    launches = zip(*[_launches(operation, recompute) for operation in operations], strict=True)
    return Timed(by_path, Passes(*map(sum, launches)))


def _products(products: Sequence[Product], device: Device, precision: Precision, recompute: Recompute) -> list:
    """Forward, by input and by weight: three sizes of each product, all in one look at the device's curve."""
    if not products:
        return []
    sizes = [(p.m, p.n, p.k, p.batch) for p in products]
    forward = _gemm_s(sizes, device, precision)
    by_input = _gemm_s([(m, k, n, batch) for m, n, k, batch in sizes], device, precision)
    by_weight = _gemm_s([(n, k, m, batch) for m, n, k, batch in sizes], device, precision, weight_gradient=True)
    found = []
    for product, f, i, w in zip(products, forward, by_input, by_weight, strict=True):
        again = f if recompute in product.again else 0.0
        found.append((product.path, Passes(f, again, i, w) if product.weight else Passes(f, again, i + w, 0.0)))
    return found


def _gemm_s(sizes: Sequence[tuple], device: Device, precision: Precision, weight_gradient: bool = False) -> Sequence:
    if not any(map(any_array, sizes)):
        return [device.gemm_s(m, n, k, precision, batch, weight_gradient) for m, n, k, batch in sizes]
    m, n, k, batch = _stacked(*zip(*sizes, strict=True))
    seconds: Any = device.gemm_s(m, n, k, precision=precision, batch=batch, weight_gradient=weight_gradient)
    return list(seconds)


def _attends(attends: Sequence[Attend], device: Device, precision: Precision, recompute: Recompute) -> list:
    found = []
    for a in attends:
        forward = device.attention_s(a.flops, a.queries, a.head_dim, precision=precision)
        backward_flops = _BACKWARD_ATTENTION * a.flops
        backward = device.attention_s(backward_flops, a.queries, a.head_dim, precision=precision, backward=True)
        found.append((a.path, Passes(forward, forward if recompute in a.again else 0.0, backward, 0.0)))
    return found


def _streams(streams: Sequence[Stream], device: Device, precision: Precision, recompute: Recompute) -> list:
    if not streams:
        return []
    forward = _stream_s([(s.forward_bytes, s.forward_launches) for s in streams], device)
    backward = _stream_s([(s.backward_bytes, s.backward_launches) for s in streams], device)
    found = []
    for s, plain_forward, plain_backward in zip(streams, forward, backward, strict=True):
        f = plain_forward * device.stream_ratio(f"{s.kernel}_forward", precision)
        b = plain_backward * device.stream_ratio(f"{s.kernel}_backward", precision)
        found.append((s.path, Passes(f, f if recompute in s.again else 0.0, b, 0.0)))
    return found


def _stream_s(kernels: Sequence[tuple[Floats, int]], device: Device) -> Sequence:
    """Each set of kernels moves its bytes in equal parts."""
    if not any(map(any_array, kernels)):
        return [count * device.stream_s(num_bytes / count) if count else 0.0 for num_bytes, count in kernels]
    num_bytes, count = _stacked(*zip(*kernels, strict=True))
    seconds: Any = np.where(count > 0, count * device.stream_s(num_bytes / np.maximum(count, 1)), 0.0)
    return list(seconds)


def _stacked(*columns: Sequence) -> np.ndarray:
    """For each column one row for each operation, however many layouts each value is for."""
    values = [np.asarray(value, dtype=np.float64) for column in columns for value in column]
    together = np.stack(np.broadcast_arrays(*values))
    return together.reshape(len(columns), -1, *together.shape[1:])


def _launches(operation: Operation, recompute: Recompute) -> tuple[int, int, int, int]:
    """Kernels launched for `operation`, by pass, as `Passes` orders them."""
    if isinstance(operation, Stream):
        forward, backward = operation.forward_launches, operation.backward_launches
        return forward, forward if recompute in operation.again else 0, backward, 0
    again = 1 if recompute in operation.again else 0
    return (1, again, 1, 1) if isinstance(operation, Product) else (1, again, 3, 0)
