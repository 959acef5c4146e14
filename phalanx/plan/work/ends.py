"""The operations before the first layer and after the last one."""

from __future__ import annotations

from phalanx.plan.work.local import Local
from phalanx.plan.work.operations import ALWAYS_FULL, Operation, Product, Stream

# Bytes that fp32 cross-entropy moves for each logit when its steps are kernels of their own (cast, maximum,
# subtraction, exponential, sum, and division and subtraction backward), and in one fused pass each way.
_LOSS_BYTES = (34.0, 16.0)
_FUSED_LOSS_BYTES = (4.0, 4.0)


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
    logits = local.tokens * rows
    forward, backward = _FUSED_LOSS_BYTES if local.software.fused_loss else _LOSS_BYTES
    return [
        Stream("compute/norm", normed * (r + c), normed * (2 * (r + c) + r), 1, 2, frozenset(), f"{model.norm}_norm"),
        Product("compute/head", local.tokens, rows, model.hidden, again=frozenset()),
        Stream("compute/loss", logits * forward, logits * backward, 10, 5, frozenset(), "loss"),
    ]
