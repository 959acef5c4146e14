"""The operations of one layer on one rank, forward; what the backward pass adds follows from them.

Bytes count every element that a kernel reads or writes, each once: what a program without waste moves. Letters as in
`phalanx.plan.types`; c is the bytes of an element that is multiplied, r those of the residual stream.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.model.shapes import mean_keys
from phalanx.plan.types import Floats, Recompute
from phalanx.plan.work.activation import activation
from phalanx.plan.work.local import Local
from phalanx.plan.work.mixture import mixture, mixture_rows
from phalanx.plan.work.operations import (
    ALWAYS_FULL,
    CORE,
    FIRST_PRODUCT,
    SECOND_PRODUCT,
    Attend,
    Operation,
    Product,
    Stream,
)

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

    Phalanx casts once per step (`phalanx.plan.constant.optimizer.cast_s`).
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
