"""What a rank does for one micro-batch: matrix products, attention and kernels that wait for memory, and their seconds.

`Local` is what one rank has of a micro-batch and of a layer; `timed` turns operations into seconds on a device. Sizes
may be arrays, one number for each layout of a set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from phalanx.plan.hardware.device_model import Device
from phalanx.plan.types import (
    BYTES,
    Floats,
    Ints,
    Job,
    Model,
    Precision,
    Recompute,
    Software,
    Strategy,
    any_array,
    largest,
)

ALWAYS_FULL: frozenset[Recompute] = frozenset(("full",))  # computed again only where everything is
CHEAP: frozenset[Recompute] = frozenset(("elementwise", "mlp", "alternate", "full"))
"""Cheap to compute and large to keep: norms, activations, rotation."""
SECOND_PRODUCT: frozenset[Recompute] = frozenset(("alternate", "full"))
"""The second, fourth, … product of a layer, in the order in which it is computed."""
FIRST_PRODUCT: frozenset[Recompute] = frozenset(("mlp", "full"))
"""The first product of an MLP: one product to make again, for the widest tensor of a layer."""
CORE: frozenset[Recompute] = frozenset(("attention", "full"))
"""Scores and what is made of them, where they are written to memory (Korthikanti et al., section 5)."""


@dataclass(frozen=True)
class Product:
    """``(m, k) x (k, n)``, `batch` times.

    Backward takes two of the same size. Where `weight` is true, one of them sums the gradient of a weight over m
    tokens, which can wait; else both are needed to go on.
    """

    path: str
    m: Ints
    n: Ints
    k: Ints
    batch: Ints = 1
    weight: bool = True
    again: frozenset[Recompute] = ALWAYS_FULL  # the kinds of recompute under which the forward product is made twice


@dataclass(frozen=True)
class Attend:
    """Causal attention in one kernel: `flops` of both products over the keys that are seen, forward."""

    path: str
    flops: Floats
    queries: Ints
    head_dim: int
    again: frozenset[Recompute] = ALWAYS_FULL


@dataclass(frozen=True)
class Stream:
    """Kernels that are bound by memory: bytes read and written, and how many kernels that takes."""

    path: str
    forward_bytes: Floats
    backward_bytes: Floats
    forward_launches: int = 1
    backward_launches: int = 1
    again: frozenset[Recompute] = CHEAP
    kernel: str = ""  # by which a device knows how much slower than their bytes its kernels are


Operation: TypeAlias = Product | Attend | Stream


@dataclass(frozen=True)
class Passes:
    """Seconds of the passes over one micro-batch."""

    forward: Floats = 0.0
    again: Floats = 0.0  # of what the backward pass computes once more
    backward_input: Floats = 0.0  # gradients that the stage before waits for
    backward_weight: Floats = 0.0  # gradients of weights, which can be put off

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.forward + other.forward,
            self.again + other.again,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    @classmethod
    def sum(cls, several: Iterable[Passes]) -> Passes:
        """All of them together, in order; a few times as fast as adding one after the other."""
        # Plain sums of each field: a search adds up tens of passes for every layout.
        passes = list(several)
        return cls(
            sum([each.forward for each in passes], 0.0),
            sum([each.again for each in passes], 0.0),
            sum([each.backward_input for each in passes], 0.0),
            sum([each.backward_weight for each in passes], 0.0),
        )

    def __mul__(self, times: Floats) -> Passes:
        return Passes(
            self.forward * times, self.again * times, self.backward_input * times, self.backward_weight * times
        )

    @property
    def backward(self) -> Floats:
        """The whole backward pass."""
        return self.again + self.backward_input + self.backward_weight

    @property
    def total(self) -> Floats:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Local:
    """Sizes on one rank."""

    model: Model
    software: Software
    sequence: int
    tensor: Ints
    tokens: Ints  # that its matrix products see, T = b S / c
    kept_tokens: Ints  # of the residual stream, which sequence parallelism splits over the tensor-parallel ranks
    sequences: Ints  # of a micro-batch
    heads: Ints
    # Outputs of q, and of q, k and v together.
    query_rows: Ints
    projection_rows: Ints
    inner: Ints  # width of the MLP, or of each expert
    dense_inner: Ints  # width of the MLP in layers without experts
    expert_ranks: Ints  # data-parallel ranks that hold different experts
    compute_bytes: int  # of one element of what is multiplied
    weight_bytes: int  # of one element of a matrix as it is kept; what is multiplied is cast from it where it is wider

    def kernel(self, name: str) -> str:
        """What a device's file calls a kernel of a layer."""
        return f"{name}_compiled" if self.software.compiled else name

    @property
    def residual_bytes(self) -> int:
        """Of one element of the residual stream."""
        return self.software.residual_bytes

    @property
    def gates(self) -> int:
        """Matrices that the MLP's first product has: gate and up, or up."""
        return 2 if self.model.gated else 1

    @property
    def in_width(self) -> Ints:
        """Outputs of a dense MLP's first product."""
        return self.dense_inner * self.gates

    @property
    def routed_rows(self) -> Floats:
        """Rows that the experts of a rank compute: as many copies come in as go out, and room that stays empty."""
        return self.tokens * self.model.experts_per_token * self.model.capacity_factor


def local_of(job: Job, strategy: Strategy) -> Local:
    """The sizes on a rank of `strategy`; they are the same on all of them, up to what does not divide."""
    model, tensor = job.model, strategy.tensor
    tokens = strategy.micro_batch * job.sequence // strategy.context
    query_rows = model.heads * model.head_dim // tensor
    # Where there are fewer key/value heads than ranks, ranks hold copies.
    kv_rows = largest(model.kv_heads / tensor, 1) * model.head_dim
    return Local(
        model=model,
        software=job.software,
        sequence=job.sequence,
        tensor=tensor,
        tokens=tokens,
        kept_tokens=tokens // tensor if strategy.sequence_parallel else tokens,
        sequences=strategy.micro_batch,
        heads=model.heads // tensor,
        query_rows=query_rows,
        projection_rows=query_rows + 2 * kv_rows,
        inner=model.mlp_width // tensor,
        dense_inner=model.dense_mlp_width // tensor,
        expert_ranks=strategy.expert,
        compute_bytes=BYTES[job.precision],
        weight_bytes=weight_bytes(job, strategy),
    )


def weight_bytes(job: Job, strategy: Strategy) -> int:
    """Of one element of a matrix as the model keeps it.

    Phalanx keeps fp32 matrices in a single process; spread, what it multiplies and fp32 masters beside.

    Sets of layouts count as spread: a single process has nothing to choose from.
    """
    axes = (strategy.pipeline, strategy.replicate, strategy.shard, strategy.context, strategy.tensor)
    alone = all(isinstance(size, int) and size == 1 for size in axes)
    # On several ranks fp32 masters lie beside the matrices, which are in the type that is multiplied.
    spread_bytes = BYTES[job.precision] if job.software.is_phalanx else job.software.weight_bytes
    return job.software.weight_bytes if alone else spread_bytes


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
    attends = []
    for a in [o for o in operations if isinstance(o, Attend)]:
        # Attention has a curve of its own, over queries, and few operations: each is asked for alone.
        forward = device.attention_s(a.flops, a.queries, a.head_dim, precision=precision)
        backward_flops = _BACKWARD_ATTENTION * a.flops
        backward = device.attention_s(backward_flops, a.queries, a.head_dim, precision=precision, backward=True)
        attends.append((a.path, Passes(forward, forward if recompute in a.again else 0.0, backward, 0.0)))
    for path, passes in (
        *_products([o for o in operations if isinstance(o, Product)], device, precision, recompute),
        *attends,
        *_streams([o for o in operations if isinstance(o, Stream)], device, precision, recompute),
    ):
        by_path[path] = by_path[path] + passes if path in by_path else passes
    launches = zip(*[_launches(operation, recompute) for operation in operations], strict=True)
    return Timed(by_path, Passes(*map(sum, launches)))


def _products(products: Sequence[Product], device: Device, precision: Precision, recompute: Recompute) -> list:
    """Forward, by input and by weight: three sizes of each product, all in one look at the device's curve."""
    if not products:
        return []
    # Of a product (m, k) x (k, n) the gradient of the input is (m, n) x (n, k), that of the weight (n, m) x (m, k). The
    # latter sums over tokens, and devices have a curve of its own for it.
    sizes = [(p.m, p.n, p.k, p.batch) for p in products]
    forward = _gemm_s(sizes, device, precision)
    by_input = _gemm_s([(m, k, n, batch) for m, n, k, batch in sizes], device, precision)
    by_weight = _gemm_s([(n, k, m, batch) for m, n, k, batch in sizes], device, precision, weight_gradient=True)
    found = []
    for product, f, i, w in zip(products, forward, by_input, by_weight, strict=True):
        again = f if recompute in product.again else 0.0
        # Without a weight both gradients are needed to go on: nothing of it can be put off.
        found.append((product.path, Passes(f, again, i, w) if product.weight else Passes(f, again, i + w, 0.0)))
    return found


def _gemm_s(sizes: Sequence[tuple], device: Device, precision: Precision, weight_gradient: bool = False) -> Sequence:
    # Plain numbers one by one: for a handful of sizes numpy's calls would take longer than the arithmetic.
    if not any(map(any_array, sizes)):
        return [device.gemm_s(m, n, k, precision, batch, weight_gradient) for m, n, k, batch in sizes]
    m, n, k, batch = _stacked(*zip(*sizes, strict=True))
    seconds: Any = device.gemm_s(m, n, k, precision=precision, batch=batch, weight_gradient=weight_gradient)
    return list(seconds)


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
    # Launches are paid for each kernel, so the bytes are divided before they are timed.
    if not any(map(any_array, kernels)):
        return [count * device.stream_s(num_bytes / count) if count else 0.0 for num_bytes, count in kernels]
    num_bytes, count = _stacked(*zip(*kernels, strict=True))
    seconds: Any = np.where(count > 0, count * device.stream_s(num_bytes / np.maximum(count, 1)), 0.0)
    return list(seconds)


def _stacked(*columns: Sequence) -> np.ndarray:
    values = [np.asarray(value, dtype=np.float64) for column in columns for value in column]
    together = np.stack(np.broadcast_arrays(*values))
    return together.reshape(len(columns), -1, *together.shape[1:])


def _launches(operation: Operation, recompute: Recompute) -> tuple[int, int, int, int]:
    if isinstance(operation, Stream):
        forward, backward = operation.forward_launches, operation.backward_launches
        return forward, forward if recompute in operation.again else 0, backward, 0
    # In its backward pass a product launches two kernels, one for each gradient, and fused attention three.
    again = 1 if recompute in operation.again else 0
    return (1, again, 1, 1) if isinstance(operation, Product) else (1, again, 3, 0)
