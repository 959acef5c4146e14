"""What a model holds and what a token costs, from its config alone.

Logical parameters are the matrices as the literature names them, however they are stored. Orientation: projections
that read the residual stream (``q k v gate up``) are (outputs, inputs); projections that write it (``o down``) are
(inputs, outputs). So dimension 0 counts heads or MLP columns in both, logical matrices that are used together stack
along it, and a tensor-parallel shard is a row block of every matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from phalanx.model.config import ModelConfig

Role = Literal["embedding", "input", "output", "norm", "bias", "head"]


@dataclass(frozen=True)
class Parameter:
    """One logical parameter: its shape, what it does, and the layer it sits in (None outside the blocks)."""

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of matrix products for one token; a multiply-add counts two."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Forward and backward; activation recompute is not useful work, and left out."""
        return self.forward + self.backward


def parameter_table(config: ModelConfig) -> dict[str, Parameter]:
    """Every logical parameter by name, in order of use.

    Raises:
        UserError: the vocabulary or the longest sequence is not known yet.
    """
    config.require_sizes()
    width = config.hidden
    table = [Parameter("embedding", (config.vocab_rows, width), "embedding")]
    if config.position == "learned":
        table.append(Parameter("position_embedding", (config.max_sequence, width), "embedding"))
    for layer in range(config.layers):
        prefix, serial = f"layers.{layer}.", config.block == "serial"
        table += _norm(config, prefix + ("attention.norm" if serial else "norm"), layer)
        table += _attention(config, layer)
        table += _norm(config, prefix + "mlp.norm", layer) if serial else []
        table += _mlp(config, layer)
    table += _norm(config, "norm", None)
    if not config.tie_embeddings:
        table.append(Parameter("head", (config.vocab_rows, width), "head"))
    return {parameter.name: parameter for parameter in table}


def num_parameters(config: ModelConfig) -> int:
    """Elements of all parameters, each counted once (tied embeddings too, padded vocabulary rows included)."""
    return sum(parameter.size for parameter in parameter_table(config).values())


def flops_per_token(config: ModelConfig, sequence_length: int) -> Flops:
    """Mean cost of one token in a sequence of `sequence_length` tokens.

    Forward, for each layer: ``2 D E (H + 2K)`` (q, k, v) ``+ 2 H E D`` (o) ``+ 2 m D F`` (MLP, m = 3 matrices if gated,
    else 2) ``+ 4 H E n`` (scores and values over n keys); head ``2 D V`` with padded V. ``n`` is the exact mean number
    of keys seen: ``(S + 1) / 2`` when full (causal attention is half of the square), ``w (2 S - w + 1) / (2 S)`` with a
    window ``w <= S``. Grouped heads save in the projections only. Backward is twice the forward. Embedding look-ups,
    norms, activations, rotation and softmax are not counted, nor is masking by document.
    """
    table = parameter_table(config)
    matrices = sum(p.size for p in table.values() if p.role in ("input", "output"))
    head = config.vocab_rows * config.hidden
    per_key = 4 * config.heads * config.head_dim
    keys = sum(mean_keys(sequence_length, config.window_of(layer)) for layer in range(config.layers))
    forward = 2.0 * (matrices + head) + per_key * keys
    return Flops(forward, 2 * forward)


def mean_keys(sequence_length: int, window: int | None) -> float:
    """Mean number of keys that a query sees in causal attention over `sequence_length` tokens."""
    seen = min(window or sequence_length, sequence_length)
    return seen * (2 * sequence_length - seen + 1) / (2 * sequence_length)


def _attention(config: ModelConfig, layer: int) -> list[Parameter]:
    prefix, width, size = f"layers.{layer}.attention.", config.hidden, config.head_dim
    rows = {"q": config.heads * size, "k": config.num_kv_heads * size, "v": config.num_kv_heads * size}
    table = [Parameter(prefix + name, (n, width), "input", layer) for name, n in rows.items()]
    if config.bias != "none":
        table += [Parameter(f"{prefix}{name}_bias", (n,), "bias", layer) for name, n in rows.items()]
    if config.qk_norm:
        table += [Parameter(f"{prefix}{name}_norm", (size,), "norm", layer) for name in ("q", "k")]
    return table + _output(config, prefix + "o", config.heads * size, layer)


def _mlp(config: ModelConfig, layer: int) -> list[Parameter]:
    prefix, width, inner = f"layers.{layer}.mlp.", config.hidden, config.mlp_width
    names = ("gate", "up") if config.gated else ("up",)
    table = [Parameter(prefix + name, (inner, width), "input", layer) for name in names]
    if config.bias == "all":
        table += [Parameter(f"{prefix}{name}_bias", (inner,), "bias", layer) for name in names]
    return table + _output(config, prefix + "down", inner, layer)


def _output(config: ModelConfig, name: str, inputs: int, layer: int) -> list[Parameter]:
    table = [Parameter(name, (inputs, config.hidden), "output", layer)]
    if config.bias == "all":
        table.append(Parameter(f"{name}_bias", (config.hidden,), "bias", layer))
    return table


def _norm(config: ModelConfig, name: str, layer: int | None) -> list[Parameter]:
    table = [Parameter(name, (config.hidden,), "norm", layer)]
    if config.norm == "layer" and config.bias == "all":
        table.append(Parameter(f"{name}_bias", (config.hidden,), "bias", layer))
    return table
