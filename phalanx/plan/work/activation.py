"""What comes between the two products of an MLP."""

from __future__ import annotations

from phalanx.plan.types import Floats
from phalanx.plan.work.local import Local
from phalanx.plan.work.operations import Operation, Stream


def activation(local: Local, tokens: Floats, inner: Floats, path: str) -> list[Operation]:
    """What comes between the products of an MLP: bias and GELU, or a gate, for `tokens` rows of `inner` outputs."""
    c, elements = local.compute_bytes, tokens * inner
    biased = local.model.bias == "all"
    name = f"{path}_activation"
    if local.model.gated:
        if local.software.fused_elementwise:
            return [Stream(name, 3 * c * elements, 5 * c * elements)]
        # silu, then the product; backward: two products, then silu's own.
        return [Stream(name, 5 * c * elements, 9 * c * elements, 2, 3, kernel="swiglu")]
    bias_bytes = c * elements if biased else 0.0
    if local.software.fused_elementwise:
        return [Stream(name, 2 * c * elements, 3 * c * elements + bias_bytes, 1, 2 if biased else 1)]
    moved = 2 * c * elements + 2 * bias_bytes, 3 * c * elements + bias_bytes
    return [Stream(name, *moved, 2, 2, kernel="gelu")]
