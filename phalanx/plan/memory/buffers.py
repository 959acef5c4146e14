"""What travels, and what the allocator wastes; bytes on one rank."""

from __future__ import annotations

from phalanx.plan.hardware.either import largest, least, where
from phalanx.plan.memory.pieces import Pieces
from phalanx.plan.memory.state import matrix_bytes, ways_of
from phalanx.plan.types import Floats, Number

# Megatron-LM: an activation and a gradient that come, and as many that go.
_MESSAGES = 4
# Reductions of buckets on their way while another is made (phalanx.parallel.zero.chunk), by ZeRO stage.
_BUCKETS_IN_FLIGHT = {0: 1, 1: 1, 2: 3, 3: 1}

FRAGMENTATION = Number(
    0.03,
    "ratio",
    "assumed",
    "share of what comes and goes within a step that a caching GPU allocator holds and cannot use",
)


def messages(pieces: Pieces) -> Floats:
    """Activations and gradients between pipeline stages that are on their way.

    Phalanx lets go of what it sent when something comes back that says it has arrived: where there are chunks, about a
    turn of the pipeline later, for activations as for gradients.
    """
    local, software, strategy = pieces.local, pieces.job.software, pieces.strategy
    one = local.kept_tokens * pieces.job.model.hidden * software.residual_bytes
    count: Floats = _MESSAGES
    if software.is_phalanx:
        count = where(strategy.chunks > 1, 2 * strategy.pipeline + 2, _MESSAGES)
    return (strategy.pipeline > 1) * count * one


def gathered(pieces: Pieces) -> Floats:
    """Weights of ZeRO-3 that are whole for a moment: those of a layer, and of the next one, which are asked for.

    And in Phalanx whole fp32 gradients of a layer, which are reduced while the next ones are made.
    """
    if pieces.strategy.zero < 3:
        return 0.0
    ways, _ = ways_of(pieces.strategy)
    software = pieces.job.software
    each = matrix_bytes(pieces.job, pieces.strategy) if software.is_phalanx else software.weight_bytes
    rows = pieces.weights[0].rows
    for weights in pieces.weights[1:]:
        rows = largest(rows, weights.rows)
    reduced = 4 if software.is_phalanx else 0
    return where(ways > 1, rows * pieces.job.model.hidden * (2 * each + reduced), 0)


def in_flight(pieces: Pieces, gradients: Floats) -> Floats:
    """Copies of gradients as they travel: of narrower type than they are kept in, or of ZeRO-2's and 3's buckets.

    Args:
        gradients: bytes of whole fp32 gradients of the rank, which no buckets exceed.
    """
    software, strategy = pieces.job.software, pieces.strategy
    if software.reduce_bytes == software.gradient_bytes:
        return 0.0
    bucket = strategy.bucket_bytes if strategy.bucket_bytes else gradients
    narrow = software.reduce_bytes / software.gradient_bytes
    copies = least(_BUCKETS_IN_FLIGHT[strategy.zero] * bucket, gradients) * narrow
    return where(strategy.data * strategy.context > 1, copies, 0)


def exchanged(pieces: Pieces) -> Floats:
    """Rows that tensor-parallel ranks gather for a product: of the stream, and of its gradient."""
    local = pieces.local
    whole = local.tokens * pieces.job.model.hidden * local.compute_bytes
    split = (local.tensor > 1) & bool(pieces.strategy.sequence_parallel)
    return where(split, 2 * whole, 0)
