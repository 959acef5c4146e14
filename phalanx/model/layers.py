"""The named seams of a decoder: embedding, input projection, attention, output projection, loss head; and norms.

Each is a small module that a layout may replace from outside by another with the same call. Activations between them
are token rows, (T, width) with T = B*S, so that eager execution needs no reshapes. Stored weights are float32 masters;
each matrix is cast to the compute dtype where it is used, or once for all uses until it changes (`Matrix.cast`).

Shapes: B batch, S sequence, T tokens (B*S), D hidden, H query heads, K key/value heads, E head size, F MLP hidden,
V vocabulary rows, N rows of a stacked weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.kernels.fp8 import Fp8Weight, fp8_linear
from phalanx.kernels.linear import linear, project
from phalanx.kernels.loss import linear_cross_entropy, mask_padding
from phalanx.kernels.pointwise import rms_norm
from phalanx.model.config import ModelConfig
from phalanx.model.forward_context import Attending, Context
from phalanx.model.rotary import rotate, rotate_heads


class Make(NamedTuple):
    """How weights are created and used: where, in which master dtype, in which compute dtype, or products in 8 bits."""

    device: torch.device | None
    dtype: torch.dtype
    compute: torch.dtype
    fp8: bool = False

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter still to be initialised."""
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=self.dtype))


class Part(NamedTuple):
    """Rows ``[start, start + rows)`` of the stored parameter `attribute` are the logical parameter `name`."""

    name: str
    attribute: str
    start: int
    rows: int


class Stored(nn.Module):
    """A module whose stored parameters hold logical ones; `parts` lists the rows of each."""

    parts: tuple[Part, ...]


class Matrix(Stored):
    """A module that multiplies by its `weight` in the compute dtype, or in 8 bits (`phalanx.kernels.fp8`)."""

    weight: nn.Parameter
    cast: Tensor | None

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.compute, self.fp8 = make.compute, make.fp8
        # The weight in the compute dtype, or in 8 bits, where somebody keeps it up to date (`DecoderPart.hold_casts`);
        # None: it is cast wherever it is used.
        self.register_buffer("cast", None, persistent=False)
        self.quantised: Fp8Weight | None = None

    def hold_cast(self) -> None:
        """Keep a cast of the weight from now on, where it is of another dtype; still to be filled."""
        if self.fp8:
            self.quantised = Fp8Weight(self.weight.detach())
        elif self.weight.dtype != self.compute:
            self.cast = torch.empty_like(self.weight, dtype=self.compute, requires_grad=False)

    def held(self) -> tuple[Tensor, ...]:
        """What is kept beside the weight."""
        quantised = self.quantised
        made = () if quantised is None else (quantised.stored, quantised.transposed, quantised.scale)
        return made if self.cast is None else (self.cast, *made)


def stack(attribute: str, rows: Mapping[str, int], suffix: str = "") -> tuple[Part, ...]:
    """Parts of `attribute` for logical parameters under one another."""
    starts = [sum(list(rows.values())[:i]) for i in range(len(rows))]
    named = zip(rows.items(), starts, strict=True)
    return tuple(Part(name + suffix, attribute, start, n) for (name, n), start in named)


class Norm(Stored):
    """RMSNorm or LayerNorm over the residual stream, computed in its dtype (float32) and returned in compute dtype."""

    bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, name: str, make: Make) -> None:
        super().__init__()
        self.rms, self.eps, self.compute = config.norm == "rms", config.norm_eps, make.compute
        self.weight = make.empty(config.hidden)
        self.bias = make.empty(config.hidden) if not self.rms and config.bias == "all" else None
        self.parts = stack("weight", {name: config.hidden})
        if self.bias is not None:
            self.parts += stack("bias", {name: config.hidden}, "_bias")

    def forward(self, x_TD: Tensor) -> Tensor:
        """Normalise rows: (T, D) -> (T, D)."""
        if self.rms:
            return rms_norm(x_TD, self.weight, self.eps, self.compute)
        return F.layer_norm(x_TD, self.weight.shape, self.weight, self.bias, self.eps).to(self.compute)


class Embedding(Stored):
    """Token rows, plus learned position rows where the model has them."""

    position_weight: nn.Parameter | None

    def __init__(self, config: ModelConfig, make: Make) -> None:
        super().__init__()
        self.weight = make.empty(config.vocab_rows, config.hidden)
        learned = config.position == "learned"
        self.position_weight = make.empty(config.max_sequence, config.hidden) if learned else None
        self.parts = stack("weight", {"embedding": config.vocab_rows})
        if learned:
            self.parts += stack("position_weight", {"position_embedding": config.max_sequence})

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor | None) -> Tensor:
        """Rows (T, D) for tokens at positions 0, 1, 2 … or at `positions_BS`."""
        x_BSD = F.embedding(tokens_BS, self.weight)
        if self.position_weight is not None:
            # A slice where it can be one: its gradient is a sum, that of a lookup is scattered.
            if positions_BS is None:
                x_BSD = x_BSD + self.position_weight[: tokens_BS.shape[1]]
            else:
                x_BSD = x_BSD + F.embedding(positions_BS, self.position_weight)
        return x_BSD.flatten(0, 1)


class InputProjection(Matrix):
    """Stacked matrices (logical name -> output rows) that read the residual stream, as one GEMM: (T, D) -> (T, N)."""

    bias: nn.Parameter | None

    def __init__(self, hidden: int, rows: Mapping[str, int], biased: Mapping[str, int], make: Make) -> None:
        super().__init__(make)
        self.weight = make.empty(sum(rows.values()), hidden)
        self.bias = make.empty(sum(biased.values())) if biased else None
        self.parts = stack("weight", rows) + stack("bias", biased, "_bias")

    def forward(self, x_TD: Tensor) -> Tensor:
        """Project rows."""
        bias = None if self.bias is None else self.bias.to(self.compute)
        if bias is not None and len(bias) < len(self.weight):  # only q, k and v have one
            bias = F.pad(bias, (0, len(self.weight) - len(bias)))
        if not self.fp8:
            return linear(x_TD, self.weight, bias, cast_OI=self.cast)
        out = fp8_linear(x_TD, self.weight, self.quantised)
        return out if bias is None else out + bias


class OutputProjection(Matrix):
    """Stacked matrices that write the residual stream, as one GEMM: (T, N) -> (T, D), summed over the stack."""

    bias: nn.Parameter | None

    def __init__(self, hidden: int, rows: Mapping[str, int], biased: bool, make: Make) -> None:
        super().__init__(make)
        # (inputs, outputs), so that the logical matrices stack along dimension 0 here too; so do their biases.
        self.weight = make.empty(sum(rows.values()), hidden)
        self.bias = make.empty(len(rows) * hidden) if biased else None
        self.parts = stack("weight", rows)
        if biased:
            self.parts += stack("bias", dict.fromkeys(rows, hidden), "_bias")

    def forward(self, inner_TN: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """Project rows, and add them to `residual` (in its dtype) where one is given."""
        bias = None
        if self.bias is not None:  # one for each logical matrix of the stack: summed to (D,)
            width = self.weight.shape[1]
            bias = (self.bias.view(-1, width).sum(0) if len(self.bias) > width else self.bias).to(self.compute)
        if self.fp8:
            out = fp8_linear(inner_TN, self.weight, self.quantised, inputs_first=True)
            out = out if bias is None else out + bias
        elif bias is None and residual_TD is not None and residual_TD.dtype == inner_TN.dtype:
            # One GEMM makes the product and adds the stream.
            return project(inner_TN, self.weight, residual_TD, cast_IO=self.cast)
        else:
            out = project(inner_TN, self.weight, bias, cast_IO=self.cast)
        return out if residual_TD is None else residual_TD + out


class Attention(Stored):
    """Causal attention over stacked heads: (T, (H + 2K) E) -> (T, H E)."""

    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None

    def __init__(self, config: ModelConfig, layer: int, make: Make) -> None:
        super().__init__()
        self.layer = layer
        site = f"layers.{layer}.attention.weights"
        self.how = Attending(config.window_of(layer), config.attention_backend, config.attention_dropout, site)
        self.group, self.size = config.heads // config.num_kv_heads, config.head_dim
        self.eps = config.norm_eps
        self.q_norm = make.empty(self.size) if config.qk_norm else None
        self.k_norm = make.empty(self.size) if config.qk_norm else None
        prefix = f"layers.{layer}.attention."
        names = ("q_norm", "k_norm") if config.qk_norm else ()
        self.parts = tuple(Part(prefix + name, name, 0, self.size) for name in names)

    def forward(self, qkv_TN: Tensor, context: Context) -> Tensor:
        """Attend within each sequence (and document, and window); the result is in token rows again."""
        # (B, S, heads, E), normalised and rotated as configured. The head count is that of the input: a tensor rank has
        # its own heads.
        qkv = qkv_TN.view(context.batch, context.length, -1, self.size)
        kv_heads = qkv.shape[2] // (self.group + 2)
        heads = kv_heads * self.group
        if context.rotary is not None and self.q_norm is None:
            q, k, v = rotate_heads(qkv, *context.rotary, heads, kv_heads)
        else:
            q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=2)
            # Before they are rotated, as in Qwen 3 and Gemma 3: norms have a weight for each dimension of a head.
            if self.q_norm is not None and self.k_norm is not None:
                q, k = rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)
            if context.rotary is not None:
                q, k = rotate(q, *context.rotary), rotate(k, *context.rotary)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if context.cache is None:
            out_BHSE = context.attend(q, k, v, self.how)
        else:
            out_BHSE = context.cache.attend(self.layer, q, k, v, lambda: context.attend(q, k, v, self.how))
        return out_BHSE.transpose(1, 2).reshape(len(qkv_TN), -1)


class LossHead(Matrix):
    """Logits and loss over the vocabulary."""

    def __init__(self, config: ModelConfig, make: Make, tied: nn.Parameter | None) -> None:
        super().__init__(make)
        self.softcap, self.z_loss = config.logit_softcap, config.z_loss
        self.vocabulary = config.vocab_size
        # Tied, but with the embedding on another pipeline stage, it is a copy under the embedding's logical name.
        self.weight = make.empty(config.vocab_rows, config.hidden) if tied is None else tied
        name = "embedding" if config.tie_embeddings else "head"
        self.parts = stack("weight", {name: config.vocab_rows}) if tied is None else ()

    def forward(self, hidden_TD: Tensor, targets_T: Tensor, weights_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sums over tokens of weighted loss and weighted z-loss (`phalanx.kernels.loss.linear_cross_entropy`)."""
        return linear_cross_entropy(
            hidden_TD,
            self.weight,
            targets_T,
            weights_T,
            softcap=self.softcap,
            z_loss=self.z_loss,
            vocabulary=self.vocabulary,
            cast_VD=self.cast,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits (..., V), capped as in the loss; -inf for the rows of padding."""
        logits = F.linear(hidden, self.weight.to(self.compute)).float()
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return mask_padding(logits, self.vocabulary)
