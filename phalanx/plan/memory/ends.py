"""What the loss head takes on the last stage, and what keeps the stream at both ends; bytes of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.hardware.either import largest, where
from phalanx.plan.types import Floats, Job, Strategy
from phalanx.plan.work.ends import loss_chunk
from phalanx.plan.work.local import Local


@dataclass(frozen=True)
class Head:
    """Bytes of the loss head.

    Attributes:
        stream: input of the last norm, which is kept like an activation.
        kept: from the end of its forward pass to its backward pass.
        passing: besides, for a moment in either pass.
    """

    stream: Floats
    kept: Floats
    passing: Floats


def head(job: Job, strategy: Strategy, local: Local) -> Head:
    """The last norm, logits and loss."""
    stream = local.kept_tokens * job.model.hidden * local.residual_bytes
    if not job.software.is_phalanx:
        return Head(stream, *_megatron(local))
    row_bytes = local.kept_tokens * (4 if job.model.norm == "rms" else 8)
    alone = strategy.world_size == 1
    normed = local.kept_tokens * job.model.hidden * local.compute_bytes
    kept, passing = _phalanx(local, alone)
    return Head(stream, kept + row_bytes + alone * normed, passing)


def embedding_mask(job: Job, local: Local) -> Floats:
    """The mask of the dropout behind the embedding, where it is kept."""
    kept = job.model.dropout and not job.software.is_phalanx
    return local.kept_tokens * job.model.hidden if kept else 0.0


def _megatron(local: Local) -> tuple[Floats, Floats]:
    """The product's input, and logits: in fp32 as the softmax leaves them (Korthikanti et al., 4.3), or as they are.

    A fused loss makes their gradient in their place; else it is made in fp32 there and cast.
    """
    c = local.compute_bytes
    logits = local.tokens * local.model.vocab_rows / local.tensor
    rows = local.kept_tokens * local.model.hidden * c
    return rows + logits * (c if local.software.fused_loss else 4), 0.0 if local.software.fused_loss else logits * c


def _phalanx(local: Local, alone: Floats) -> tuple[Floats, Floats]:
    """Gradients of hidden rows and of the weight are made in the forward pass, chunk by chunk of tokens.

    Small logits are kept whole. The other way, backward takes both gradients times the loss's: on a CPU into new
    memory, on a GPU in place, where logits have no fp32 copy either.
    """
    c, width, tokens = local.compute_bytes, local.model.hidden, local.tokens
    words = local.model.vocab_rows / local.tensor
    weight = words * width
    made = local.kept_tokens * width * c + weight * 4
    chunk, is_small = loss_chunk(local)
    logits = chunk * words
    own_cast = 0 if c == 4 else weight * c * (1 - alone)  # a program alone has one beside its weights
    cast = 0 if c == 4 else own_cast + weight * (c + 4) + logits * c
    again = where(chunk < tokens, largest(logits * 4, weight * 4), 0)
    spread_rows = where((local.tensor > 1), tokens * width * c, 0)
    if local.software.on_cpu:
        chunked = made, largest(2 * 4 * logits + cast + again + spread_rows, made)
    else:
        part = where(chunk < tokens, weight * 4, 0) if c == 4 else own_cast  # of the sum, or the weight's cast
        chunked = made, logits * c + part + spread_rows
    whole = tokens * words
    plain = whole * 4 + tokens * width * c * (1 - alone) + own_cast
    passing = whole * 4 + weight * 4
    return where(is_small, plain, chunked[0]), where(is_small, passing, chunked[1])
