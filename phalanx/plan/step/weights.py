"""How many weights a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.types import Floats, Ints, Model


@dataclass(frozen=True)
class Weights:
    """Elements on one tensor-parallel rank.

    Attributes:
        dense: shared by all data-parallel ranks.
        experts: of the experts that the rank holds.
    """

    dense: Floats = 0.0
    experts: Floats = 0.0

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.dense + other.dense, self.experts + other.experts)

    def __mul__(self, times: Floats) -> Weights:
        return Weights(self.dense * times, self.experts * times)

    @property
    def total(self) -> Floats:
        """All of them."""
        return self.dense + self.experts


def layer_weights(model: Model, layer: int, active: bool = False) -> int:
    """Elements of the matrices of one layer; of those that one token meets where `active`."""
    attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    matrices = 3 if model.gated else 2
    if not model.is_mixture(layer):
        return attention + matrices * model.hidden * model.dense_mlp_width
    count = (model.experts_per_token if active else model.experts) + model.shared_experts
    return attention + model.hidden * model.experts + count * matrices * model.hidden * model.mlp_width


def of_kind(model: Model, is_mixture: bool, tensor: Ints, expert: Ints) -> Weights:
    """Weights of one layer: matrices are split over `tensor` ranks, experts over `expert` ranks too."""
    layer = next(n for n in range(model.layers) if model.is_mixture(n) == is_mixture)
    norms = (1 if model.block == "parallel" else 2) * model.hidden * (2 if model.norm == "layer" else 1)
    biases = 0.0
    if model.bias != "none":
        biases += model.head_dim * (model.heads + 2 * model.kv_heads) / tensor
    if model.bias == "all" and not is_mixture:
        biases += 2 * model.hidden + model.dense_mlp_width / tensor
    matrices = layer_weights(model, layer)
    routed = 0
    if is_mixture:
        routed = model.experts * (3 if model.gated else 2) * model.hidden * model.mlp_width
    return Weights((matrices - routed) / tensor + norms + biases, routed / tensor / expert)


def of_embedding(model: Model, tensor: Ints) -> Weights:
    """Weights of the embedding, and of learned positions, which are not split."""
    positions = model.max_sequence * model.hidden if model.position == "learned" else 0
    return Weights(model.vocab_rows * model.hidden / tensor + positions)


def of_head(model: Model, tensor: Ints, alone: bool) -> Weights:
    """Weights of the last norm and of the head, which is the embedding where tied and on the same rank (`alone`)."""
    norm = model.hidden * (2 if model.norm == "layer" else 1)
    matrix = 0 if model.tie_embeddings and alone else model.vocab_rows * model.hidden / tensor
    return Weights(norm + matrix)
