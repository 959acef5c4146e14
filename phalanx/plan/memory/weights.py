"""What a rank holds of the model's parameters: rows of the hidden width, and vectors. All matrices have such rows.

Projections that read the stream have a row for each output, those that write it one for each input, so that dimension 0
counts heads, MLP columns, or words (`phalanx.model.shapes`); tensor-parallel ranks split it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from phalanx.plan.types import Floats, Ints, Model
from phalanx.plan.work.local import Local


@dataclass(frozen=True)
class Held:
    """Parameters on one tensor-parallel rank.

    Attributes:
        rows: of the blocks' matrices, of the hidden width.
        expert_rows: of the experts that are split over expert-parallel ranks.
        ends: rows of embedding, positions and head.
        matrices: logical matrices of all three, however they are stored.
        vectors: elements of norms and biases.
        vector_rows: rows of the hidden width that they take, each stored one at least one.
    """

    rows: Floats = 0.0
    expert_rows: Floats = 0.0
    ends: Floats = 0.0
    matrices: Floats = 0.0
    vectors: Floats = 0.0
    vector_rows: Floats = 0.0

    def __add__(self, other: Held) -> Held:
        return Held(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: Floats) -> Held:
        return Held(*(getattr(self, f.name) * times for f in fields(self)))


def of_layer(local: Local, is_mixture: bool) -> Held:
    """One layer."""
    model = local.model
    attention = local.projection_rows + local.query_rows
    norms, biases = _vectors(local, is_mixture)
    vectors, stored = sum(norms) + sum(biases), _rows_of(norms, model) + _rows_of(biases, model)
    matrices = 3 if model.gated else 2
    if not is_mixture:
        return Held(attention + local.dense_inner * matrices, 0.0, 0.0, 4 + matrices, vectors, stored)
    shared = local.inner * matrices * model.shared_experts
    experts = model.experts / local.expert_ranks
    count = 5 + matrices * (experts + model.shared_experts)
    routed = experts * local.inner * matrices
    return Held(attention + shared + model.experts, routed, 0.0, count, vectors, stored)


def of_embedding(model: Model, tensor: Ints) -> Held:
    """The embedding, and learned positions, which are not split."""
    positions = model.max_sequence if model.position == "learned" else 0
    return Held(ends=model.vocab_rows / tensor + positions, matrices=2 if positions else 1)


def of_head(model: Model, tensor: Ints, beside_embedding: bool) -> Held:
    """The last norm, and the head: a copy of the embedding where both are tied and that is on another rank."""
    norms = _norm(model)
    vectors = Held(vectors=sum(norms), vector_rows=_rows_of(norms, model))
    if model.tie_embeddings and beside_embedding:
        return vectors
    return vectors + Held(ends=model.vocab_rows / tensor, matrices=1)


def _norm(model: Model) -> list[Floats]:
    return [model.hidden] * (2 if model.norm == "layer" and model.bias == "all" else 1)


def _vectors(local: Local, is_mixture: bool) -> tuple[list[Floats], list[Floats]]:
    """Elements of each stored norm, and of each stored bias."""
    model = local.model
    norms = _norm(model) * (1 if model.block == "parallel" else 2)
    norms += [model.head_dim] * (2 if model.qk_norm else 0)
    if model.bias == "none":
        return norms, []
    wide = [] if is_mixture or model.bias == "qkv" else [local.in_width]
    outputs = 0 if model.bias == "qkv" else (1 if is_mixture else 2)
    if model.merged and not is_mixture:
        return norms, [local.projection_rows + sum(wide), *([outputs * model.hidden] if outputs else [])]
    return norms, [local.projection_rows, *wide, *[model.hidden] * outputs]


def _rows_of(lengths: list[Floats], model: Model) -> Floats:
    return sum(-(-length // model.hidden) for length in lengths)
