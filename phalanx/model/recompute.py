"""Selective recompute: keep what is dear to compute (matrix products, attention), compute the rest again."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from phalanx.kernels import linear


def selective_contexts() -> tuple[Any, Any]:
    """The pair of contexts for `torch.utils.checkpoint.checkpoint(context_fn=...)`."""
    kept = _kept_operators()

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts


def _kept_operators() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset(
        (
            *linear.operators(),
            aten.mm.default,
            aten.addmm.default,
            aten.bmm.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            torch.ops.higher_order.flex_attention,
        )
    )
