"""What a layer of Megatron-LM, or a program like it, keeps: Korthikanti et al., arXiv 2205.05198, section 4.

Their 34 s b h bytes of a layer (16 bits, dropout, no parallelism) are: 11 and 5 a s / h of attention, 19 of the MLP and
4 of the norms. Written term by term here, so that grouped heads, gates, other types and fused attention follow.
Letters as there: T tokens, R of them kept of the residual stream (T / t with sequence parallelism), D hidden.
"""

from __future__ import annotations

from phalanx.plan.memory.kept import Kept
from phalanx.plan.types import Floats, Strategy
from phalanx.plan.work.local import Local
from phalanx.plan.work.mixture import routed_rows

_LSE_BYTES = 4
_MASK_BYTES = 1


def layer(local: Local, strategy: Strategy, is_mixture: bool) -> Kept:
    """One layer of any kind; windows save nothing where scores are written, and there is nothing to save else."""
    whole = _stream(local) + _attention(local) + _core(local) + _mlp(local, is_mixture)
    chosen = {
        "none": whole,
        "attention": whole - _core(local),
        "elementwise": _without_elementwise(local, is_mixture),
        "mlp": _without_elementwise(local, is_mixture) - _wide(local, is_mixture) * local.compute_bytes,
        "alternate": _without_elementwise(local, is_mixture) - _alternate(local, is_mixture) * local.compute_bytes,
        "full": local.kept_tokens * local.model.hidden * local.residual_bytes,
    }[strategy.recompute]
    return Kept(whole, chosen, _waiting(local, is_mixture), 0.0, _passing(local, is_mixture))


def _branches(local: Local) -> int:
    """Norms of a layer, and products that write the stream."""
    return 1 if local.model.block == "parallel" else 2


def _stream(local: Local) -> Floats:
    """Inputs of the norms, of the products that read the stream, and masks of the dropout behind those that write."""
    each = local.residual_bytes + local.compute_bytes + (_MASK_BYTES if local.model.dropout else 0)
    return _branches(local) * local.kept_tokens * local.model.hidden * each


def _attention(local: Local) -> Floats:
    """q, k, v, and the result, which is the input of the output projection; their norms' inputs where they are normed.

    Rotation keeps no more: its input is free once it is done.
    """
    normed = local.projection_rows / 2 + local.query_rows / 2 if local.model.qk_norm else 0
    return local.tokens * (local.projection_rows + local.query_rows + normed) * local.compute_bytes


def _core(local: Local) -> Floats:
    """Softmax, its dropped result and the mask (5 a s^2 b in 16 bits); or only the log-sum-exps of fused attention."""
    if local.software.fused_attention:
        return local.tokens * local.heads * _LSE_BYTES
    dropped = local.compute_bytes + _MASK_BYTES if local.model.attention_dropout else 0
    return local.tokens * local.heads * local.sequence * (local.compute_bytes + dropped)


def _mlp(local: Local, is_mixture: bool) -> Floats:
    """Inputs of the non-linearity and of the second product; what a gate multiplies too, unless it is fused.

    A mixture keeps the routed rows besides, which are copies of tokens, its probabilities, and its results, which are
    weighted.
    """
    if not is_mixture:
        return _inner(local, local.tokens, local.dense_inner)
    rows, model, c = routed_rows(local), local.model, local.compute_bytes
    routed = _inner(local, rows, local.inner) + 2 * rows * model.hidden * c + local.kept_tokens * model.experts * 4
    return routed + _inner(local, local.tokens, local.inner * model.shared_experts)


def _inner(local: Local, rows: Floats, width: Floats) -> Floats:
    products = local.gates + 1 + (1 if local.model.gated and not local.software.fused_elementwise else 0)
    return rows * width * products * local.compute_bytes


def _wide(local: Local, is_mixture: bool) -> Floats:
    """Elements of what the MLP's first product gives."""
    if not is_mixture:
        return local.tokens * local.in_width
    return (routed_rows(local) + local.tokens * local.model.shared_experts) * local.inner * local.gates


def _alternate(local: Local, is_mixture: bool) -> Floats:
    """Elements of what every second product gives: keys, what attention adds to the stream, and up."""
    keys = (local.projection_rows - local.query_rows) / 2 if not local.software.merged_projections else 0
    added = local.kept_tokens * local.model.hidden
    up = _wide(local, is_mixture) / local.gates if not local.software.merged_projections and not is_mixture else 0
    return local.tokens * keys + added + up


def _without_elementwise(local: Local, is_mixture: bool) -> Floats:
    """The layer's input, and what matrix products and attention give."""
    width, c = local.model.hidden, local.compute_bytes
    stream = local.kept_tokens * width * (local.residual_bytes + _branches(local) * c)
    core = local.tokens * (local.projection_rows + local.query_rows) * c + _core(local)
    return stream + core + _wide(local, is_mixture) * c


def _waiting(local: Local, is_mixture: bool) -> Floats:
    """Inputs and gradients of outputs of all matrix products."""
    width, c, n = local.model.hidden, local.compute_bytes, _branches(local)
    wide = _wide(local, is_mixture)
    attention = local.tokens * (local.projection_rows + local.query_rows)
    return c * (2 * n * local.kept_tokens * width + attention + wide + wide / local.gates)


def _passing(local: Local, is_mixture: bool) -> Floats:
    """Gradients of the stream and of what is widest in a layer, before and after the non-linearity."""
    wide = _wide(local, is_mixture)
    stream = local.kept_tokens * local.model.hidden * (local.residual_bytes + local.compute_bytes)
    return stream + (wide + wide / local.gates) * local.compute_bytes
