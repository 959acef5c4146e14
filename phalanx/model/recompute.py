"""What the backward pass computes again instead of keeping, level by level.

| level | kept of a layer, besides its input | computed again |
|---|---|---|
| ``none`` | whatever autograd saves | nothing |
| ``selective`` | results of matrix products and attention | norms, rotation, the MLP's non-linearity |
| ``mlp`` | the same without the MLP's first product | and that product, one of the layer's products |
| ``full`` | nothing | the layer, up to what its last product reads |

The MLP's first product is the widest tensor of a layer and a third (gated: two thirds) of the MLP's forward FLOPs, so
``mlp`` makes seven products for an MLP instead of six, where computing all of it again makes eight. Gradients are the
same bits at every level.

It happens within a layer: hooks of the layer, which may wait for weights, stay outside.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.kernels import linear

Recompute = Literal["none", "selective", "mlp", "full"]
CHOOSING = ("selective", "mlp")
"""Levels at which some of a layer's results are kept: where it is compiled, its compiler has to know."""

P = ParamSpec("P")
T = TypeVar("T")

# Set while the MLP's first product is made: a product is recognised by the module that asks for it, not by its shape,
# which others may share. The backward pass may run in a thread of autograd's, so it is a variable of each thread.
_IN_FIRST_PRODUCT: ContextVar[bool] = ContextVar("in_first_product", default=False)

# The modules of a decoder block that make it; where projections are merged, those of attention are made with it.
_FIRST_PRODUCTS = ("mlp_input", "input")


def recomputed(level: Recompute, layer: Callable[[Tensor], Tensor], x_TD: Tensor) -> Tensor:
    """``layer(x)``; the backward pass computes again what `level` says."""
    if level == "none" or not torch.is_grad_enabled():
        return layer(x_TD)
    chosen: dict[str, Any] = {}
    if level != "full":
        chosen = {"context_fn": partial(selective_contexts, level == "mlp")}
    out: Tensor = checkpoint(layer, x_TD, use_reentrant=False, preserve_rng_state=False, **chosen)
    return out


def first_product(make: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """``make(...)``, which makes the first product of an MLP: ``mlp`` computes it again."""
    if torch.compiler.is_compiling():  # traced operators know the module that they are of
        return make(*args, **named)
    before = _IN_FIRST_PRODUCT.set(True)
    try:
        return make(*args, **named)
    finally:
        _IN_FIRST_PRODUCT.reset(before)


def selective_contexts(mlp_again: bool) -> tuple[Any, Any]:
    """The contexts of `torch.utils.checkpoint.checkpoint(context_fn=...)`; `mlp_again`: the MLP's first product too."""
    aten = torch.ops.aten
    kept = frozenset(
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

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operator not in kept or (mlp_again and _is_first_product()):
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts


def _is_first_product() -> bool:
    if _IN_FIRST_PRODUCT.get():
        return True
    modules = traceback.get_current_meta().get("nn_module_stack") or {}
    return any(path.rpartition(".")[2] in _FIRST_PRODUCTS for path, _ in modules.values())
