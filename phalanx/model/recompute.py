"""What the backward pass of a layer computes again instead of keeping: nothing, all that is cheap, or everything.

It happens within the layer, so that a compiled layer is compiled with it, and hooks that wait for weights stay outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.kernels import linear

Recompute = Literal["none", "selective", "full"]
"""``"selective"``: all but the results of matrix products and attention. ``"full"``: all but the layer's input."""


def recomputed(what: Recompute, layer: Callable[[Tensor], Tensor], x_TD: Tensor) -> Tensor:
    """``layer(x)``, of which the backward pass computes `what` again. Gradients are the same bits."""
    if what == "none" or not torch.is_grad_enabled():
        return layer(x_TD)
    contexts: dict[str, Any] = {"context_fn": selective_contexts} if what == "selective" else {}
    out: Tensor = checkpoint(layer, x_TD, use_reentrant=False, preserve_rng_state=False, **contexts)
    return out


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
            aten._scaled_mm.default,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention.default,
            aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default,
            torch.ops.higher_order.flex_attention,
        )
    )
