"""What tensor parallelism exchanges in one layer, and how much of it matrix products cover.

Each branch of a block gathers the rows that sequence parallelism split, and scatters the sums of its output
(Korthikanti et al., arXiv 2205.05198, section 4.2.2); without sequence parallelism one all-reduce stands for both. A
parallel block has one pair instead of two. Backward has as many, and gathers once more what the gradients of weights
need, beside the gradient of the input; Megatron-LM sums gradients of inputs beside those of weights since 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.communication.covered import OVERLAP_SLOWDOWN, Covered, beside
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.either import functions
from phalanx.plan.types import Floats, Job, Strategy
from phalanx.plan.work.local import Local
from phalanx.plan.work.operations import Passes

FUSED_OVERLAP = 0.63
"""Mean share of an exchange that a fused kernel hides between devices with NVLink (Flux, arXiv 2406.06858: A100 0.63,
H800 0.72)."""


_TILE_ROWS = 128


@dataclass(frozen=True)
class _Pair:
    """A collective and the matrix product beside it: seconds, and those of the product in chunks."""

    exchange_s: Floats
    product_s: Floats
    chunked_s: Floats


@dataclass(frozen=True)
class RowExchange:
    """Seconds in which the rows of a micro-batch change between tensor-parallel ranks.

    Attributes:
        gather_s: of the rows that sequence parallelism split; without it nothing.
        scatter_s: of their sums; without it they stay on all ranks (an all-reduce).
    """

    gather_s: Floats
    scatter_s: Floats


def row_exchange(job: Job, strategy: Strategy, cluster: Cluster, local: Local) -> RowExchange:
    """What every branch of a layer exchanges, the embedding and the head too."""
    num_bytes = local.tokens * job.model.hidden * local.compute_bytes
    if not strategy.sequence_parallel:
        return RowExchange(0.0, cluster.collective_s("all_reduce", num_bytes, strategy.tensor))
    gather_s = cluster.collective_s("all_gather", num_bytes, strategy.tensor)
    return RowExchange(gather_s, cluster.collective_s("reduce_scatter", num_bytes, strategy.tensor))


def tensor(job: Job, strategy: Strategy, cluster: Cluster, local: Local, rows: RowExchange) -> Covered:
    """The exchanges of one layer."""
    if isinstance(strategy.tensor, int) and strategy.tensor == 1:
        return Covered()
    branches, calls = len(_inputs(job, local)), len(_inputs(job, local)) * (strategy.tensor > 1)
    gather, scatter = rows.gather_s, rows.scatter_s
    again = 1.0 if strategy.recompute == "full" else 0.0
    if not strategy.sequence_parallel:
        backward = _backward(job, cluster, local, scatter)
        exposed = Passes(branches * scatter, again * branches * scatter, backward, 0.0)
        hidden = Passes(0.0, 0.0, branches * scatter - backward, 0.0)
        return Covered(exposed, hidden, Passes(calls, again * calls, calls, 0))
    both = branches * (gather + scatter)
    shown = _forward(job, strategy, cluster, local, gather, scatter)
    f = functions(shown)
    backward = f.least(shown, branches * gather + _backward(job, cluster, local, scatter))
    exposed = Passes(shown, again * shown, backward, 0.0)
    hidden = Passes(both - shown, again * (both - shown), both - backward + branches * gather, 0.0)
    return Covered(exposed, hidden, Passes(2 * calls, again * 2 * calls, 3 * calls, 0))


def _inputs(job: Job, local: Local) -> list[Floats]:
    """Outputs of the products that read a branch's gathered rows; a parallel block has one branch."""
    if job.model.block == "parallel":
        return [local.projection_rows + local.in_width]
    return [local.projection_rows, local.in_width]


def _backward(job: Job, cluster: Cluster, local: Local, each: Floats) -> Floats:
    """Exposed seconds of summing the gradients of all branches' inputs.

    Where the program does so, each sum runs beside the product that makes the gradient of the branch's weight.
    """
    inputs = _inputs(job, local)
    if not job.software.tensor_backward_overlap:
        return len(inputs) * each
    return sum(beside(each, _weight_gradient_s(job, cluster, local, rows)) for rows in inputs)


def _weight_gradient_s(job: Job, cluster: Cluster, local: Local, rows: Floats) -> Floats:
    return cluster.device.gemm_s(rows, job.model.hidden, local.tokens, precision=job.precision, weight_gradient=True)


def _forward(job: Job, strategy: Strategy, cluster: Cluster, local: Local, gather: Floats, scatter: Floats) -> Floats:
    """Exposed seconds of gathering the rows and scattering the sums of all branches."""
    both = len(_inputs(job, local)) * (gather + scatter)
    if strategy.tensor_overlap == "none":
        return both
    if strategy.tensor_overlap == "fused":
        return both * (1 - FUSED_OVERLAP)
    pairs = _pairs(job, strategy.tensor_chunks, cluster, local, gather, scatter)
    return sum(_chunked(pair, strategy.tensor_chunks) for pair in pairs)


def _pairs(job: Job, chunks: int, cluster: Cluster, local: Local, gather: Floats, scatter: Floats) -> list[_Pair]:
    """The products into and out of each branch; the parallel block pairs its exchanges with the MLP (MegaScale 3.2)."""
    width, device = job.model.hidden, cluster.device
    inner = [(local.in_width, local.dense_inner)]
    if job.model.block == "serial":
        inner.append((local.projection_rows, local.query_rows))
    rows = _chunk_rows(local.tokens, chunks)
    pairs = []
    for into, out in inner:
        for exchange, n, k in ((gather, into, width), (scatter, width, out)):
            whole = device.gemm_s(local.tokens, n, k, precision=job.precision)
            parts = local.tokens / rows * device.gemm_s(rows, n, k, precision=job.precision)
            pairs.append(_Pair(exchange, whole, functions(parts).largest(parts, whole)))
    return pairs


def _chunk_rows(tokens: Floats, chunks: int) -> Floats:
    """Rows of a chunk: whole tiles, since a program would not cut through one."""
    near = (tokens / chunks / _TILE_ROWS + 0.5) // 1 * _TILE_ROWS
    return functions(near).largest(near, functions(tokens).least(tokens / chunks, _TILE_ROWS))


def _chunked(pair: _Pair, chunks: int) -> Floats:
    """Exposed seconds when the exchange of a chunk runs beside the product of another.

    The first (or last) chunk's exchange has nothing beside it; after that the longer of the two is waited for, never
    more than one after the other.
    """
    f, most = functions(pair.exchange_s, pair.chunked_s), 1 - 1 / chunks
    slowed = pair.chunked_s + OVERLAP_SLOWDOWN * f.least(pair.exchange_s, pair.chunked_s) * most
    overlapped = pair.exchange_s / chunks + f.largest(pair.exchange_s, slowed) * most + slowed / chunks
    return f.least(overlapped - pair.product_s, pair.exchange_s)
