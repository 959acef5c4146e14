"""The operations of one layer, and of both ends of the model, on one rank: forward; backward follows from them.

Bytes count every element that a kernel reads or writes, each once: what a program without waste moves. Letters as in
`phalanx.plan.types`; c is the bytes of an element that is multiplied, r those of the residual stream.

The second half is what the ranks of a layer exchange meanwhile, and how much of it computing covers: `tensor_exchange`,
`context_exchange` (keys and values in a ring, or heads among all), `expert_exchange` and `zero3_exchange`.

Tensor parallelism: each branch of a block gathers the rows that sequence parallelism split, and scatters the sums of
its output (Korthikanti et al., arXiv 2205.05198, section 4.2.2); without sequence parallelism one all-reduce stands for
both. A parallel block has one pair instead of two. Backward has as many, and gathers once more what the gradients of
weights need, beside the gradient of the input; Megatron-LM sums gradients of inputs beside those of weights since 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from phalanx.model.shapes import mean_keys
from phalanx.plan.hardware.cluster import Cluster
from phalanx.plan.operations import (
    ALWAYS_FULL,
    CORE,
    FIRST_PRODUCT,
    SECOND_PRODUCT,
    Attend,
    Local,
    Operation,
    Passes,
    Product,
    Stream,
)
from phalanx.plan.types import Floats, Ints, Job, Recompute, Strategy, functions, largest, least, where

_SOFTMAX, _GRADIENT_SUMS = "compute/softmax", "compute/gradient_sums"
_ONE_PASS = (_SOFTMAX, _GRADIENT_SUMS)
"""Kernels that are one pass over large arrays in every program, so that their bytes alone give their time."""


def layer(local: Local, window: int, is_mixture: bool) -> list[Operation]:
    """All operations of a layer that sees `window` keys (0: all of the past)."""
    operations = [*_norms(local), *_projections(local, is_mixture), *_heads(local)]
    operations += _fused_attention(local, window) if local.software.fused_attention else _written_scores(local)
    operations += mixture(local) if is_mixture else activation(local, local.tokens, local.dense_inner, "compute/mlp")
    return [*operations, *_residual(local), *_weights(local, is_mixture)]


def slower(operations: list[Operation], times: float) -> list[Operation]:
    """The same with memory-bound kernels between products that take `times` as long (`Residual.kernels`)."""
    if times == 1:
        return operations
    return [
        replace(each, forward_bytes=each.forward_bytes * times, backward_bytes=each.backward_bytes * times)
        if isinstance(each, Stream) and each.path not in _ONE_PASS
        else each
        for each in operations
    ]


def _norms(local: Local) -> list[Operation]:
    """One norm for each branch, or one for both of a parallel block. Backward reads twice: for x and for the weight."""
    r, c, width = local.residual_bytes, local.compute_bytes, local.model.hidden
    count = 1 if local.model.block == "parallel" else 2
    elements = count * local.kept_tokens * width
    found: list[Operation] = [
        Stream(
            "compute/norm",
            elements * (r + c),
            elements * (2 * (r + c) + r),
            count,
            2 * count,
            kernel=local.kernel(f"{local.model.norm}_norm"),
        ),
    ]
    if local.model.qk_norm:
        rows = local.tokens * local.projection_rows
        found.append(Stream("compute/norm", rows * 2 * c, rows * 4 * c, 2, 4, kernel=local.kernel("rms_norm")))
    return found


def _projections(local: Local, is_mixture: bool) -> list[Operation]:
    """Matrix products with weights: q, k, v; out; and the MLP's two, unless experts take their place."""
    width, tokens, last = local.model.hidden, local.tokens, _last_again(local)
    if local.model.merged and not is_mixture:
        return [
            Product("compute/merged_in", tokens, local.projection_rows + local.in_width, width, again=FIRST_PRODUCT),
            Product("compute/merged_out", tokens, width, local.query_rows + local.dense_inner, again=last),
        ]
    if not local.software.merged_projections:
        return _one_by_one(local, is_mixture)
    found: list[Operation] = [
        Product("compute/attention_projections", tokens, local.projection_rows, width),
        Product("compute/attention_projections", tokens, width, local.query_rows, again=SECOND_PRODUCT),
    ]
    if not is_mixture:
        found += [
            Product("compute/mlp", tokens, local.in_width, width, again=FIRST_PRODUCT),
            Product("compute/mlp", tokens, width, local.dense_inner, again=last),
        ]
    return found


def _last_again(local: Local) -> frozenset[Recompute]:
    """When the last product of a layer is made again: nothing within the layer reads what it gives."""
    return frozenset() if local.software.stops_early else ALWAYS_FULL


def _one_by_one(local: Local, is_mixture: bool) -> list[Operation]:
    """The same where every matrix is a product of its own: q, k, v, out, gate, up, down."""
    path, width, tokens = "compute/attention_projections", local.model.hidden, local.tokens
    # torchtitan's selective op makes every second product again, in the order in which a layer computes them.
    key_rows = (local.projection_rows - local.query_rows) / 2
    found: list[Operation] = [
        Product(path, tokens, local.query_rows, width),
        Product(path, tokens, key_rows, width, again=SECOND_PRODUCT),
        Product(path, tokens, key_rows, width),
        Product(path, tokens, width, local.query_rows, again=SECOND_PRODUCT),
    ]
    if is_mixture:
        return found
    gate = [Product("compute/mlp", tokens, local.dense_inner, width, again=FIRST_PRODUCT)] * (local.gates - 1)
    up = Product("compute/mlp", tokens, local.dense_inner, width, again=FIRST_PRODUCT | SECOND_PRODUCT)
    return [*found, *gate, up, Product("compute/mlp", tokens, width, local.dense_inner, again=_last_again(local))]


def _heads(local: Local) -> list[Operation]:
    """Rows to heads and back, and rotation: copies that every program makes in some form."""
    c, q = local.compute_bytes, local.tokens * local.query_rows
    qkv = local.tokens * local.projection_rows
    found: list[Operation] = [
        Stream("compute/attention_layout", 2 * c * q, 2 * c * (q + qkv), 1, 3, ALWAYS_FULL, "rows"),
    ]
    if local.software.fused_attention and local.software.fused_elementwise and not local.software.is_phalanx:
        # Ours reads q, k and v where their projection has written them, or rotated ones.
        found.append(Stream("compute/attention_layout", 2 * c * qkv, 0.0, 3, 0, ALWAYS_FULL))
    if local.model.position == "rotary":
        turned = q + (qkv - q) / 2
        times = 1 if local.software.fused_elementwise else 3
        moved = 2 * c * turned * times
        found.append(Stream("compute/rotary", moved, moved, 2 * times, 2 * times, kernel=local.kernel("rotary")))
    if local.model.bias != "none":
        found.append(Stream("compute/bias", 0.0, c * qkv, 0, 1, ALWAYS_FULL))
    return found


def _fused_attention(local: Local, window: int) -> list[Operation]:
    """Attention that keeps scores on the chip: ``4 T E`` FLOPs per head and key seen."""
    keys = mean_keys(local.sequence, window or None)
    flops = 4.0 * local.query_rows * local.tokens * keys
    # Our kernels for CPUs go window by window, and are as fast as over sequences of that length; those of GPUs skip
    # what is masked, and are taken to be as fast as over sequences with as many keys to see.
    queries = min(window, local.sequence) if window and local.software.on_cpu else 2 * keys - 1
    return [Attend("compute/attention", flops, queries, local.model.head_dim)]


def _written_scores(local: Local) -> list[Operation]:
    """Attention through memory: two batches of products over all S x S pairs, softmax and dropout between.

    Softmax reads and writes each score, dropout does and writes a mask of a byte; backward reads both results.
    """
    batch, sequence, head = local.sequences * local.heads, local.sequence, local.model.head_dim
    rows = local.tokens // local.sequences
    scores: Floats = batch * rows * sequence
    c = local.compute_bytes
    dropped = local.model.attention_dropout
    forward = scores * (2 * c + (2 * c + 1 if dropped else 0))
    backward = scores * (3 * c + (2 * c + 1 if dropped else 0))
    launches = 2 if dropped else 1
    path = "compute/attention"
    return [
        Product(path, rows, sequence, head, batch, weight=False, again=CORE),
        Product(path, rows, head, sequence, batch, weight=False, again=CORE),
        Stream(_SOFTMAX, forward, backward, launches, launches, CORE),
    ]


def _residual(local: Local) -> list[Operation]:
    """Adding what the branches give to the residual stream; dropout writes a mask of a byte beside it.

    Without dropout the last product of a branch adds on its own. Backward, the gradients of the two branches meet.
    """
    r, c = local.residual_bytes, local.compute_bytes
    count = 1 if local.model.block == "parallel" else 2
    elements = count * local.kept_tokens * local.model.hidden
    if not local.model.dropout and c == r and (local.software.is_phalanx or not local.software.fused_elementwise):
        return [Stream("compute/residual", 0.0, elements * 3 * r, 0, count)]
    if not local.model.dropout and not local.software.fused_elementwise:
        # A product of other numbers than the stream's is cast and added; so is its gradient, the other way.
        casts = elements * (c + r)
        return [Stream("compute/residual", casts + elements * 3 * r, casts + elements * 3 * r, 2 * count, 2 * count)]
    mask = 1 if local.model.dropout else 0
    bias = c if local.model.bias == "all" else 0
    passes = 1 if local.software.fused_elementwise else 2
    forward = elements * (2 * r + c + mask) * passes
    backward = elements * (r + c + mask + bias + 3 * r)
    return [Stream("compute/residual", forward, backward, count * passes, 3 * count)]


def _weights(local: Local, is_mixture: bool) -> list[Operation]:
    """Weights cast to what is multiplied where they are kept wider, and gradients added to the sum of micro-batches.

    Phalanx casts once per step (`phalanx.plan.overheads.cast_s`).
    """
    wide, c, summed = local.weight_bytes, local.compute_bytes, local.software.gradient_bytes
    width = local.model.hidden
    inner = mixture_rows(local) if is_mixture else local.in_width + local.dense_inner
    weights = width * (local.projection_rows + local.query_rows + inner)
    found: list[Operation] = []
    if wide != c and not local.software.is_phalanx:
        found.append(Stream("compute/casts", weights * (wide + c), 0.0, 4, 0, ALWAYS_FULL))
    if not local.software.fused_gradients:
        found.append(Stream(_GRADIENT_SUMS, 0.0, weights * (c + 2 * summed), 0, 4, frozenset()))
    return found


def mixture_rows(local: Local) -> Floats:
    """Rows of all weights of the experts that a rank holds, each of the hidden width."""
    held = local.model.experts / local.expert_ranks + local.model.shared_experts
    return held * local.inner * (local.gates + 1)


def mixture(local: Local) -> list[Operation]:
    """The MLP of a mixture layer (GShard, arXiv 2006.16668; Megatron-LM's grouped products).

    A rank holds ``experts / expert_ranks`` experts and computes as many rows in all as it sent out, padded to the
    capacity. Shared experts see every token.
    """
    model, width, c = local.model, local.model.hidden, local.compute_bytes
    held = model.experts / local.expert_ranks
    rows = local.routed_rows
    moved = 2 * rows * width * c  # rows are put in the order of experts, and back
    found: list[Operation] = [
        Product("compute/router", local.kept_tokens, model.experts, width),
        Stream("compute/router", moved * 2, moved * 2, 6, 6, ALWAYS_FULL),
        Product("compute/experts", rows / held, local.inner * local.gates, width, held),
        Product("compute/experts", rows / held, width, local.inner, held),
        *activation(local, rows, local.inner, "compute/experts"),
    ]
    if model.shared_experts:
        shared = local.inner * model.shared_experts
        found += [
            Product("compute/experts", local.tokens, shared * local.gates, width),
            Product("compute/experts", local.tokens, width, shared),
            *activation(local, local.tokens, shared, "compute/experts"),
        ]
    return found


def activation(local: Local, tokens: Floats, inner: Floats, path: str) -> list[Operation]:
    """What comes between the products of an MLP: bias and GELU, or a gate, for `tokens` rows of `inner` outputs."""
    c, elements = local.compute_bytes, tokens * inner
    biased = local.model.bias == "all"
    name = f"{path}_activation"
    if local.model.gated:
        if local.software.fused_elementwise:
            return [Stream(name, 3 * c * elements, 5 * c * elements, kernel=_fused(local, "swiglu"))]
        # silu, then the product; backward: two products, then silu's own.
        return [Stream(name, 5 * c * elements, 9 * c * elements, 2, 3, kernel="swiglu")]
    bias_bytes = c * elements if biased else 0.0
    if local.software.fused_elementwise:
        moved = 2 * c * elements, 3 * c * elements + bias_bytes
        return [Stream(name, *moved, 1, 2 if biased else 1, kernel=_fused(local, "gelu"))]
    moved = 2 * c * elements + 2 * bias_bytes, 3 * c * elements + bias_bytes
    return [Stream(name, *moved, 2, 2, kernel="gelu")]


def _fused(local: Local, name: str) -> str:
    """The name of a kernel that is one pass; what is measured of the passes of the one as written says nothing."""
    return f"one_pass_{name}_compiled" if local.software.compiled else ""


# Bytes that fp32 cross-entropy moves for each logit when its steps are kernels of their own (cast, maximum,
# subtraction, exponential, sum, and division and subtraction backward), and in one fused pass each way.
_LOSS_BYTES = (34.0, 16.0)
_FUSED_LOSS_BYTES = (4.0, 4.0)

# As in phalanx.kernels.loss and phalanx.parallel.tensor.vocabulary_parallel: a chunk of tokens has 2 million logits, on
# a GPU as many as the weight has elements and at least 268 million; it has at least 256 tokens. Few logits are not cut.
_CHUNK_ELEMENTS = 1 << 21
_LEAST_GPU_CHUNK_ELEMENTS = 1 << 28
_LEAST_CHUNK = 256
_PLAIN_ELEMENTS = {2: 1 << 20, 4: 1 << 17}
# Bytes that its kernels move for each logit: on a CPU log-softmax, exponential and factor in fp32, and casts either
# way; on a GPU one kernel reads them and writes their gradient over them.
_CHUNKED_LOSS_BYTES = {2: 36.0, 4: 24.0}
_GPU_LOSS_BYTES = {2: 4.0, 4: 8.0}


def embedding(local: Local) -> list[Operation]:
    """Looking rows up, adding positions, dropping some; backward sets a gradient of all rows to zero and adds to it."""
    model, r = local.model, local.residual_bytes
    elements = local.tokens * model.hidden
    positions = 3 * r if model.position == "learned" else 0
    mask = 2 * r + 1 if model.dropout else 0
    forward = elements * (local.software.weight_bytes + r + positions + mask)
    whole = model.vocab_rows / local.tensor * model.hidden
    backward = elements * (r + 2 * local.software.gradient_bytes + mask) + whole * local.software.gradient_bytes
    return [Stream("compute/embedding", forward, backward, 3, 4, ALWAYS_FULL, "embedding")]


def head(local: Local) -> list[Operation]:
    """The last norm, the product that gives logits, and the loss on each rank's share of the vocabulary."""
    model, r, c = local.model, local.residual_bytes, local.compute_bytes
    # Recomputing covers layers alone: the last norm, product and loss run once, whatever the level.
    rows = model.vocab_rows / local.tensor
    normed = local.kept_tokens * model.hidden
    forward, backward = _loss_bytes(local)
    return [
        Stream("compute/norm", normed * (r + c), normed * (2 * (r + c) + r), 1, 2, frozenset(), f"{model.norm}_norm"),
        Product("compute/head", local.tokens, rows, model.hidden, again=frozenset()),
        Stream("compute/loss", forward, backward, 10, 5, frozenset(), "loss"),
    ]


def loss_chunk(local: Local) -> tuple[Ints, bool]:
    """Tokens whose logits Phalanx has at once, and whether those of all are so few that plain autograd has them."""
    words = local.model.vocab_rows / local.tensor
    elements: Floats = _CHUNK_ELEMENTS
    if not local.software.on_cpu:
        elements = largest(_LEAST_GPU_CHUNK_ELEMENTS, words * local.model.hidden)
    chunk = least(local.tokens, largest(_LEAST_CHUNK, elements // words))
    return chunk, (local.tensor == 1) & (local.tokens * words <= _PLAIN_ELEMENTS[local.compute_bytes])


def _loss_bytes(local: Local) -> tuple[Floats, Floats]:
    """That the loss moves in the forward and in the backward pass, its products aside."""
    logits = local.tokens * local.model.vocab_rows / local.tensor
    if not local.software.is_phalanx:
        forward, backward = _FUSED_LOSS_BYTES if local.software.fused_loss else _LOSS_BYTES
        return logits * forward, logits * backward
    each = (_CHUNKED_LOSS_BYTES if local.software.on_cpu else _GPU_LOSS_BYTES)[local.compute_bytes]
    half = (logits * each + _head_weight_bytes(local)) / 2
    return half, half


def _head_weight_bytes(local: Local) -> Floats:
    """Of the head's weight and its gradient: cast, added up over the chunks, multiplied with the loss's gradient.

    On a GPU products of 16 bit add to the sum themselves, which reads and writes it.
    """
    c = local.compute_bytes
    chunk, is_plain = loss_chunk(local)
    chunks = where(is_plain, 1, -(-local.tokens // chunk))
    by_products = c < 4 and not local.software.on_cpu
    cast = 0 if c == 4 else local.weight_bytes + c + (0 if by_products else chunks * (c + 4))
    each = cast + (8 if by_products else 12) * (chunks - 1) + where(is_plain, 0, 8)
    return local.model.vocab_rows / local.tensor * local.model.hidden * each


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
    """Seconds in which the rows of a micro-batch change between tensor-parallel ranks."""

    gather_s: Floats  # of the rows that sequence parallelism split; without it nothing
    scatter_s: Floats  # of their sums; without it they stay on all ranks (an all-reduce)


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
    sizes = [(rows, job.model.hidden, local.tokens) for rows in inputs]
    products = [cluster.device.gemm_s(*size, precision=job.precision, weight_gradient=True) for size in sizes]
    return sum(exposed_beside(each, product_s) for product_s in products)


def _forward(job: Job, strategy: Strategy, cluster: Cluster, local: Local, gather: Floats, scatter: Floats) -> Floats:
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
    # Chunks are whole tiles, since a program would not cut through one.
    near = (local.tokens / chunks / _TILE_ROWS + 0.5) // 1 * _TILE_ROWS
    rows = functions(near).largest(near, functions(local.tokens).least(local.tokens / chunks, _TILE_ROWS))
    pairs = []
    for into, out in inner:
        for exchange, n, k in ((gather, into, width), (scatter, width, out)):
            whole = device.gemm_s(local.tokens, n, k, precision=job.precision)
            parts = local.tokens / rows * device.gemm_s(rows, n, k, precision=job.precision)
            pairs.append(_Pair(exchange, whole, functions(parts).largest(parts, whole)))
    return pairs


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
    # q, k and v on the way there, the result on the way back.
    num_bytes = local.tokens * (local.projection_rows + local.query_rows) * local.compute_bytes
    each = cluster.collective_s("all_to_all", num_bytes, strategy.context, strategy.tensor)
    calls = 2 * (strategy.context > 1)
    return Covered(Passes(each, again * each, each, 0.0), collectives=Passes(calls, again * calls, calls, 0))


def _key_bytes(local: Local) -> Floats:
    return local.tokens * (local.projection_rows - local.query_rows) * local.compute_bytes


def _ring(strategy: Strategy, cluster: Cluster, num_bytes: Floats, attention_s: Floats) -> tuple[Floats, Floats]:
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
    num_bytes = local.routed_rows * share * local.model.hidden * local.compute_bytes
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
    # Each exchange is then waited for where it is called.
    if not job.software.data_overlap:
        return Covered(Passes(gather, 0.0, gather + scatter, 0.0), collectives=Passes(1, 0, 2, 0))
    forward, backward = exposed_beside(gather, computing.forward), exposed_beside(gather + scatter, computing.backward)
    hidden = Passes(gather - forward, 0.0, gather + scatter - backward, 0.0)
    return Covered(Passes(forward, 0.0, backward, 0.0), hidden, Passes(1, 0, 2, 0))


OVERLAP_SLOWDOWN = 0.1
"""Assumed share by which computing slows down beside a collective, which takes about a tenth of a device's cores
(NCCL's 8 to 16 channels of 108 to 132 multiprocessors)."""


@dataclass(frozen=True)
class Covered:
    """Seconds of the passes over one micro-batch in which ranks exchange something."""

    exposed: Passes = field(default_factory=Passes)  # the rank computes nothing meanwhile
    hidden: Passes = field(default_factory=Passes)  # it computes beside
    collectives: Passes = field(default_factory=Passes)  # that the host starts, by pass


def exposed_beside(exchange_s: Floats, computing_s: Floats) -> Floats:
    """Exposed seconds of an exchange beside computing, which it slows down."""
    f = functions(exchange_s, computing_s)
    return f.largest(exchange_s - computing_s, 0.0) + OVERLAP_SLOWDOWN * f.least(exchange_s, computing_s)
