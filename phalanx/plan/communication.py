"""What a rank exchanges with others in a step, and how much of it computing covers: bytes and seconds by axis.

In each layer there are `tensor_exchange`, `context_exchange` (keys and values in a ring, or heads among all),
`expert_exchange` and `zero3_exchange`; once per step the data-parallel ranks exchange gradients, and weights where they
are split (`data_exchange`); pipeline stages send to each other (`send_s`).

Tensor parallelism: each branch of a block gathers the rows that sequence parallelism split, and scatters the sums of
its output (Korthikanti et al., arXiv 2205.05198, section 4.2.2); without sequence parallelism one all-reduce stands for
both. A parallel block has one pair instead of two. Backward has as many, and gathers once more what the gradients of
weights need, beside the gradient of the input; Megatron-LM sums gradients of inputs beside those of weights since 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.hardware.formula import functions
from phalanx.plan.layer import routed_rows
from phalanx.plan.operations import Local, Passes
from phalanx.plan.types import Floats, Ints, Job, Strategy

Array = NDArray[np.float64]


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


def tensor_exchange(job: Job, strategy: Strategy, cluster: Cluster, local: Local, rows: RowExchange) -> Covered:
    """The exchanges of one layer."""
    if isinstance(strategy.tensor, int) and strategy.tensor == 1:
        return Covered()
    branches, calls = len(_inputs(job, local)), len(_inputs(job, local)) * (strategy.tensor > 1)
    gather, scatter = rows.gather_s, rows.scatter_s
    # Recomputing a layer from its input repeats its exchanges; milder ways keep what they received.
    again = 1.0 if strategy.recompute == "full" else 0.0
    if not strategy.sequence_parallel:
        backward = _backward(job, cluster, local, scatter)
        exposed = Passes(branches * scatter, again * branches * scatter, backward, 0.0)
        hidden = Passes(0.0, 0.0, branches * scatter - backward, 0.0)
        return Covered(exposed, hidden, Passes(calls, again * calls, calls, 0))
    both = branches * (gather + scatter)
    shown = _forward(job, strategy, cluster, local, gather, scatter)
    f = functions(shown)
    # Backward overlaps as forward does, or runs its sums beside the products of weight gradients: whichever shows less.
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
    return sum(exposed_beside(each, _weight_gradient_s(job, cluster, local, rows)) for rows in inputs)


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


def context_exchange(strategy: Strategy, cluster: Cluster, local: Local, attention: Passes) -> Covered:
    """The exchanges of one layer whose attention takes `attention` seconds.

    Ring: in each of ``context - 1`` hops, a rank sends the keys and values that it has while it attends to them, which
    slows attention down; backward their gradients travel too (Liu et al., arXiv 2310.01889). All to all: q, k, v before
    attention and the result after it change from a split sequence to split heads (Ulysses, arXiv 2309.14509); nothing
    covers that.
    """
    if isinstance(strategy.context, int) and strategy.context == 1:
        return Covered()
    again = 1.0 if strategy.recompute == "full" else 0.0
    if strategy.context_method == "ring":
        forward, forward_hidden = _ring(strategy, cluster, _key_bytes(local), attention.forward)
        backward, backward_hidden = _ring(strategy, cluster, 2 * _key_bytes(local), attention.backward_input)
        hops = strategy.context - 1
        return Covered(
            Passes(forward, again * forward, backward, 0.0),
            Passes(forward_hidden, again * forward_hidden, backward_hidden, 0.0),
            Passes(hops, again * hops, hops, 0),
        )
    num_bytes = local.tokens * (local.projection_rows + local.query_rows) * local.compute_bytes
    each = cluster.collective_s("all_to_all", num_bytes, strategy.context, strategy.tensor)
    calls = 2 * (strategy.context > 1)
    return Covered(Passes(each, again * each, each, 0.0), collectives=Passes(calls, again * calls, calls, 0))


def _key_bytes(local: Local) -> Floats:
    """Keys and values of a rank's tokens."""
    return local.tokens * (local.projection_rows - local.query_rows) * local.compute_bytes


def _ring(strategy: Strategy, cluster: Cluster, num_bytes: Floats, attention_s: Floats) -> tuple[Floats, Floats]:
    """Exposed and hidden seconds of one turn of the ring."""
    send = cluster.send_s(num_bytes, strategy.tensor)
    hops = strategy.context - 1
    shown = hops * exposed_beside(send, attention_s / strategy.context)
    return shown, hops * send - shown


def expert_exchange(strategy: Strategy, cluster: Cluster, local: Local) -> Covered:
    """Rows go to their experts and come back, forward and backward, with nothing beside (GShard, arXiv 2006.16668).

    With sequence parallelism each tensor-parallel rank sends the rows that it keeps.
    """
    if isinstance(strategy.expert, int) and strategy.expert == 1:
        return Covered()
    again = 1.0 if strategy.recompute == "full" else 0.0
    share = local.kept_tokens / local.tokens
    num_bytes = routed_rows(local) * share * local.model.hidden * local.compute_bytes
    each = 2 * cluster.collective_s("all_to_all", num_bytes, strategy.expert, strategy.tensor * strategy.context)
    calls = 2 * (strategy.expert > 1)
    return Covered(Passes(each, again * each, each, 0.0), collectives=Passes(calls, again * calls, calls, 0))


def zero3_exchange(job: Job, strategy: Strategy, cluster: Cluster, weights: Floats, computing: Passes) -> Covered:
    """The exchanges of one layer of `weights` elements per rank that computes for `computing` seconds.

    Weights are gathered for the forward and again for the backward pass, while the layer before computes; gradients are
    scattered while the next one does (arXiv 1910.02054, section 7.2), which slows that computing down.
    """
    if strategy.zero != 3:
        return Covered()
    ranks = strategy.shard * strategy.context
    gather = cluster.collective_s("all_gather", weights * job.software.gather_bytes, ranks, strategy.tensor)
    scatter = cluster.collective_s("reduce_scatter", weights * job.software.reduce_bytes, ranks, strategy.tensor)
    if not job.software.data_overlap:
        return Covered(Passes(gather, 0.0, gather + scatter, 0.0), collectives=Passes(1, 0, 2, 0))
    forward, backward = exposed_beside(gather, computing.forward), exposed_beside(gather + scatter, computing.backward)
    hidden = Passes(gather - forward, 0.0, gather + scatter - backward, 0.0)
    return Covered(Passes(forward, 0.0, backward, 0.0), hidden, Passes(1, 0, 2, 0))


@dataclass(frozen=True)
class DataExchange:
    """Seconds of what a rank exchanges for some of its weights.

    Attributes:
        reduce_s: summing their gradients.
        gather_s: collecting the weights that other ranks updated; 0 where every rank updates all.
    """

    reduce_s: Floats
    gather_s: Floats


def data_exchange(
    job: Job, strategy: Strategy, cluster: Cluster, weights: Floats, ranks: Ints | None = None
) -> DataExchange:
    """Exchanges for `weights` elements of a rank, as one message each way.

    Gradients are summed over data-parallel and context ranks. Where state is split (ZeRO 1 and up) they are scattered
    over the ranks that split it and all-reduced between the copies; updated weights are gathered.

    Args:
        ranks: that share these weights; None: all data-parallel and context ranks (experts are shared by fewer).
    """
    stride = strategy.tensor
    sharded = strategy.shard * strategy.context
    copies = strategy.replicate
    if ranks is not None:
        sharded, copies = _fewer(sharded, copies, ranks)
    num_bytes = weights * job.software.reduce_bytes
    if strategy.zero == 0:
        return DataExchange(cluster.collective_s("all_reduce", num_bytes, sharded * copies, stride), 0.0 * weights)
    between: Floats = 0.0
    if not (isinstance(copies, int) and copies == 1):
        between = cluster.collective_s("all_reduce", num_bytes / sharded, copies, stride * sharded)
    if strategy.zero == 3:  # all else goes in every pass
        return DataExchange(between, 0.0 * weights)
    scatter = cluster.collective_s("reduce_scatter", num_bytes, sharded, stride)
    gathered = weights * job.software.gather_bytes
    gather = cluster.collective_s("all_gather", gathered, sharded, stride)
    return DataExchange(scatter + between, gather)


def _fewer(sharded: Ints, copies: Ints, ranks: Ints) -> tuple[Ints, Ints]:
    """`ranks` of a group, its copies first."""
    f = functions(sharded, copies, ranks)
    copies_left = f.least(copies, ranks)
    return f.largest(ranks // copies_left, 1), copies_left


def reduce_tail_s(reduce_s: Array, ready_s: Array, backward_s: Array, buckets: Array) -> Array:
    """Seconds after the end of each rank's computing until the gradients of all its chunks are reduced.

    Chunks are reduced one after another in the order in which their last backward passes end. A chunk in several
    buckets begins while its last backward pass runs; its last bucket waits for the end.

    Args:
        reduce_s: by chunk and rank.
        ready_s: when the last backward pass of each chunk ends.
        backward_s: how long that takes.
        buckets: in each chunk, by rank.
    """
    ready_s, reduce_s, backward_s = _in_order(ready_s, reduce_s, backward_s)
    begin_s = ready_s - backward_s * (1 - 1 / buckets)
    last_s = ready_s + reduce_s / buckets
    free_s = np.zeros(len(buckets))
    for begin, seconds, last in zip(begin_s, reduce_s, last_s, strict=True):
        free_s = np.maximum(np.maximum(free_s, begin) + seconds, last)
    tail_s: Array = np.maximum(free_s - ready_s[-1], 0.0)
    return tail_s


def gather_lead_s(gather_s: Array, needed_s: Array) -> Array:
    """Seconds by which gathering weights, chunk after chunk from the start of the step, delays each rank's forwards.

    Args:
        gather_s: by chunk and rank.
        needed_s: when the first forward pass of each chunk could begin.
    """
    needed_s, gather_s = _in_order(needed_s, gather_s)
    late_s: Array = (gather_s.cumsum(axis=0) - needed_s).max(axis=0, initial=0.0)
    return late_s


def _in_order(when_s: Array, *others: Array) -> tuple[Array, ...]:
    """All with the chunks of each rank in the order of `when_s`."""
    if len(when_s) == 1:
        return when_s, *others
    order, ranks = when_s.argsort(axis=0, kind="stable"), np.arange(when_s.shape[1])
    return tuple(each[order, ranks] for each in (when_s, *others))


_RESTART_LAUNCHES = 25
"""Host work, in launches, from a send that the host waited for to the next kernel (assumed): Megatron-LM synchronises
device and host after each exchange between stages, so that the device idles while the schedule goes on in Python."""


def send_s(job: Job, strategy: Strategy, cluster: Cluster, local: Local) -> Floats:
    """Seconds in which one micro-batch's activations, or their gradients, go from a stage to the next.

    With sequence parallelism every rank sends the rows it keeps. Without, all tensor-parallel ranks hold the same rows:
    each sends all of them, or its part, and the receivers gather (arXiv 2104.04473, section 4.1, "scatter/gather").
    """
    restart = 0.0
    if not local.software.pipeline_overlap:
        restart = _RESTART_LAUNCHES * cluster.device.host_launch_s * local.software.host_factor
    return restart + _transfer_s(job, strategy, cluster, local)


def _transfer_s(job: Job, strategy: Strategy, cluster: Cluster, local: Local) -> Floats:
    stride = strategy.data * strategy.context * strategy.tensor
    whole = local.tokens * job.model.hidden * local.software.sent_bytes
    if strategy.sequence_parallel:
        return cluster.send_s(whole / strategy.tensor, stride)
    if not local.software.split_sends:
        return cluster.send_s(whole, stride)
    gather = cluster.collective_s("all_gather", whole, strategy.tensor)
    return cluster.send_s(whole / strategy.tensor, stride) + gather


OVERLAP_SLOWDOWN = 0.1
"""Assumed share by which computing slows down beside a collective, which takes about a tenth of a device's cores
(NCCL's 8 to 16 channels of 108 to 132 multiprocessors)."""


@dataclass(frozen=True)
class Covered:
    """Seconds of the passes over one micro-batch in which ranks exchange something.

    Attributes:
        exposed: the rank computes nothing meanwhile.
        hidden: it computes beside.
        collectives: that the host starts, by pass.
    """

    exposed: Passes = field(default_factory=Passes)
    hidden: Passes = field(default_factory=Passes)
    collectives: Passes = field(default_factory=Passes)


def exposed_beside(exchange_s: Floats, computing_s: Floats) -> Floats:
    """Exposed seconds of an exchange beside computing, which it slows down."""
    f = functions(exchange_s, computing_s)
    return f.largest(exchange_s - computing_s, 0.0) + OVERLAP_SLOWDOWN * f.least(exchange_s, computing_s)
