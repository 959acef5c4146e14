"""The operations of a mixture of experts on one rank: router, permutation, and the experts' products."""

from __future__ import annotations

from phalanx.plan.types import Floats
from phalanx.plan.work.activation import activation
from phalanx.plan.work.local import Local
from phalanx.plan.work.operations import ALWAYS_FULL, Operation, Product, Stream


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
