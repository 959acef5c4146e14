"""The operations of one layer, and of both ends of the model, on one rank: forward; backward follows from them.

Bytes count every element that a kernel reads or writes, each once: what a program without waste moves. Letters as in
`phalanx.plan.types`; c is the bytes of an element that is multiplied, r those of the residual stream.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.model.shapes import mean_keys
from phalanx.plan.hardware.formula import largest, least, where
from phalanx.plan.operations import (
    ALWAYS_FULL,
    CORE,
    FIRST_PRODUCT,
    SECOND_PRODUCT,
    Attend,
    Local,
    Operation,
    Product,
    Stream,
)
from phalanx.plan.types import Floats, Ints, Recompute

_SOFTMAX, _GRADIENT_SUMS = "compute/softmax", "compute/gradient_sums"
_ONE_PASS = (_SOFTMAX, _GRADIENT_SUMS)
"""Kernels that every program has as one pass over large arrays, so that their bytes say all."""


def layer(local: Local, window: int, is_mixture: bool) -> list[Operation]:
    """All operations of a layer that sees `window` keys (0: all of the past)."""
    operations = [*_norms(local), *_projections(local, is_mixture), *_heads(local)]
    operations += _fused_attention(local, window) if local.software.fused_attention else _written_scores(local)
    operations += mixture(local) if is_mixture else activation(local, local.tokens, local.dense_inner, "compute/mlp")
    return [*operations, *_residual(local), *_weights(local, is_mixture)]


def slower(operations: list[Operation], times: float) -> list[Operation]:
    """The same, whose memory-bound kernels between products take so many times as long (`Residual.kernels`)."""
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


def routed_rows(local: Local) -> Floats:
    """Rows that the experts of one rank compute: as many copies come in as go out, and room that stays empty."""
    return local.tokens * local.model.experts_per_token * local.model.capacity_factor


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
    rows = routed_rows(local)
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

# As in phalanx.kernels.loss and phalanx.parallel.tensor.vocabulary_parallel: tokens come in chunks of so many logits,
# on a GPU of as many as the weight has elements and so many at least; of so many tokens at least; few logits are not
# cut.
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
