"""The operations before the first layer and after the last one."""

from __future__ import annotations

from phalanx.plan.hardware.either import largest, least, where
from phalanx.plan.types import Floats, Ints
from phalanx.plan.work.local import Local
from phalanx.plan.work.operations import ALWAYS_FULL, Operation, Product, Stream

# Bytes that fp32 cross-entropy moves for each logit when its steps are kernels of their own (cast, maximum,
# subtraction, exponential, sum, and division and subtraction backward), and in one fused pass each way.
_LOSS_BYTES = (34.0, 16.0)
_FUSED_LOSS_BYTES = (4.0, 4.0)

# As in phalanx.kernels.loss and phalanx.parallel.tensor.vocabulary: tokens come in chunks of so many logits, on a GPU
# of as many as the weight has elements and so many at least; of so many tokens at least; few logits are not cut.
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
