"""What a layer of Phalanx keeps on one rank: read off `phalanx.model`, `phalanx.kernels` and `phalanx.parallel.tensor`.

Dropout keeps nothing: its masks are made again. Projections of split matrices keep the rows that they were given, not
those that they gathered. Letters as in `phalanx.plan.types`; w bytes of what is multiplied, r of the residual stream.
"""

from __future__ import annotations

from typing import Any

from phalanx.plan.memory.attention import Attended, attended
from phalanx.plan.memory.kept import Kept
from phalanx.plan.types import Floats, Strategy
from phalanx.plan.work.local import Local
from phalanx.plan.work.mixture import routed_rows


def layer(local: Local, strategy: Strategy, window: int, is_mixture: bool) -> Kept:
    """One layer that sees `window` keys (0: all of the past)."""
    seen = attended(local, strategy, window)
    whole = _stream(local) + seen.total + _mlp(local, is_mixture) + _joined(local)
    products = _products(local, strategy, seen, is_mixture)
    chosen = {
        "none": whole,
        "attention": whole - seen.core,
        "elementwise": products,
        "alternate": products,
        "mlp": products - _first_product(local, is_mixture) * local.compute_bytes,
        "full": local.kept_tokens * local.model.hidden * local.residual_bytes,
    }[strategy.recompute]
    # What selective recompute keeps passes no hook of autograd's, so of such a layer its input alone can leave.
    stream = local.kept_tokens * local.model.hidden * local.residual_bytes
    leaving = whole if strategy.recompute == "none" else stream
    return Kept(whole, chosen, _waiting(local, is_mixture), seen.masks, _passing(local, is_mixture), leaving)


def _norms(local: Local) -> int:
    return 1 if local.model.block == "parallel" else 2


def _stream(local: Local) -> Floats:
    """Inputs of norms (r), their results (w), and a number or two per row."""
    row_bytes = 4 if local.model.norm == "rms" else 8
    each = local.model.hidden * (local.residual_bytes + local.compute_bytes) + row_bytes
    return _norms(local) * local.kept_tokens * each


def _mlp(local: Local, is_mixture: bool) -> Floats:
    """Inputs of the non-linearity and of the second product; on a CPU a gate keeps what it multiplies too."""
    if not is_mixture:
        return _inner(local, local.tokens, local.dense_inner)
    rows, model = routed_rows(local), local.model
    routed = 2 * rows * model.hidden * local.compute_bytes + local.kept_tokens * model.experts * 4
    shared = _inner(local, local.tokens, local.inner * model.shared_experts)
    return _inner(local, rows, local.inner) + routed + shared


def _inner(local: Local, rows: Floats, width: Floats) -> Floats:
    products = 4 if local.model.gated else 2
    if local.model.gated and (local.software.fused_elementwise or not local.software.on_cpu):
        products = 3
    return rows * width * products * local.compute_bytes


def _joined(local: Local) -> Floats:
    """Merged projections join what attention and the MLP give; attention keeps its own result besides."""
    return local.tokens * local.query_rows * local.compute_bytes if local.model.merged else 0.0


def _wide(local: Local, is_mixture: bool) -> Floats:
    """Elements of what the MLP's first product gives."""
    if not is_mixture:
        return local.tokens * local.in_width
    return (routed_rows(local) + local.tokens * local.model.shared_experts) * local.inner * local.gates


def _products(local: Local, strategy: Strategy, seen: Attended, is_mixture: bool) -> Floats:
    """The layer's input, and what matrix products and attention give (`phalanx.model.recompute`).

    Products that write the stream give all T rows, before these are summed and scattered over tensor-parallel ranks.
    In fp32 without bias and dropout the product adds the residual itself, so that the last one's result is the next
    layer's input, and is not counted twice.
    """
    width, c = local.model.hidden, local.compute_bytes
    outputs = (1 if local.model.merged else 2) - adds_residual(local, strategy)
    stream = local.kept_tokens * width * local.residual_bytes + outputs * local.tokens * width * c
    projections = local.tokens * local.projection_rows + _wide(local, is_mixture)
    return stream + projections * c + seen.results_again


def _first_product(local: Local, is_mixture: bool) -> Floats:
    """Elements of what `mlp` makes again: with the MLP's product those of attention where one operation makes both.

    That is so where projections are merged, and in a parallel block whose matrices are split, which gathers once.
    """
    together = 1 if local.model.merged else (local.tensor > 1) * (local.model.block == "parallel")
    return _wide(local, is_mixture) + together * local.tokens * local.projection_rows


def adds_residual(local: Local, strategy: Strategy) -> Any:
    """Whether the products that write the stream add the residual themselves."""
    plain = local.model.bias != "all" and not local.model.dropout and local.residual_bytes == local.compute_bytes
    split = strategy.schedule in ("interleaved_zero_bubble", "zbv") and (strategy.pipeline > 1)
    return plain * (local.tensor == 1) * (1 - 1 * split)


def _waiting(local: Local, is_mixture: bool) -> Floats:
    """Inputs and gradients of outputs of all matrix products; what was gathered for them stays gathered."""
    wide, n = _wide(local, is_mixture), _norms(local)
    attention = local.tokens * (local.projection_rows + local.query_rows)
    stream = 2 * n * local.tokens * local.model.hidden
    return local.compute_bytes * (stream + attention + wide + wide / local.gates)


def _passing(local: Local, is_mixture: bool) -> Floats:
    """Gradients of the stream, and of what is widest in a layer, while what they were made of is let go of."""
    stream = local.kept_tokens * local.model.hidden * (local.residual_bytes + local.compute_bytes)
    return stream + _wide(local, is_mixture) * local.compute_bytes
