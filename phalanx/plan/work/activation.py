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
            return [Stream(name, 3 * c * elements, 5 * c * elements, kernel=_fused(local, "swiglu"))]
        # silu, then the product; backward: two products, then silu's own.
        return [Stream(name, 5 * c * elements, 9 * c * elements, 2, 3, kernel="swiglu")]
    bias_bytes = c * elements if biased else 0.0
    if local.software.fused_elementwise:
        moved = 2 * c * elements, 3 * c * elements + bias_bytes
        return [Stream(name, *moved, 1, 2 if biased else 1, kernel=_fused(local, "gelu"))]
    moved = 2 * c * elements + 2 * bias_bytes, 3 * c * elements + bias_bytes
    return [Stream(name, *moved, 2, 2, kernel="gelu")]


def _fused(local: Local, name: str) -> str:
    """The name of a kernel that is one pass; what is measured of the passes of the one as written says nothing."""
    return f"one_pass_{name}_compiled" if local.software.compiled else ""
