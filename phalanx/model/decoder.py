"""One decoder for every architecture that `ModelConfig` can declare; single-device code, no process groups, no globals.

Precision: weights are float32 masters, cast where a GEMM uses them; GEMMs, attention and activations run in
`compute_dtype`; norms, softmax and loss in float32; the residual stream in float32 by default, because bf16 (8 bits of
mantissa) rounds away a block's small update to a large stream, more so the deeper the model. Parallelism is applied
from outside through the seams of `phalanx.model.layers`.

Shapes: B batch, S sequence, T tokens (B*S), D hidden, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.core.errors import UserError
from phalanx.kernels.masks import AttentionMask
from phalanx.model.config import ModelConfig
from phalanx.model.context import Context, DropoutState, KVCache, dropout_rows
from phalanx.model.layers import Attention, Embedding, InputProjection, LossHead, Make, Norm, OutputProjection
from phalanx.model.recompute import selective_contexts
from phalanx.model.rotary import Rotary, too_long

Recompute = Literal["none", "selective", "full"]


class Block(nn.Module):
    """One layer. Serial, parallel, or parallel with merged projections: the parts differ, not the class."""

    def __init__(self, config: ModelConfig, layer: int, make: Make) -> None:
        super().__init__()
        prefix = f"layers.{layer}."
        size, kv_rows = config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {f"{prefix}attention.{n}": r for n, r in (("q", config.heads * size), ("k", kv_rows), ("v", kv_rows))}
        mlp = {f"{prefix}mlp.{name}": config.mlp_width for name in (("gate", "up") if config.gated else ("up",))}
        o, down = {f"{prefix}attention.o": config.heads * size}, {f"{prefix}mlp.down": config.mlp_width}
        biased_qkv = qkv if config.bias != "none" else {}
        biased_mlp = mlp if config.bias == "all" else {}
        everywhere = config.bias == "all"
        self.kind = "merged" if config.merged else config.block
        self.prefix, self.rate, self.activation_name = prefix, config.dropout, config.activation
        self.qkv_rows, self.inner_rows = sum(qkv.values()), config.heads * size
        if self.kind == "serial":
            self.attention_norm = Norm(config, f"{prefix}attention.norm", make)
            self.mlp_norm = Norm(config, f"{prefix}mlp.norm", make)
        else:
            self.norm = Norm(config, f"{prefix}norm", make)
        if self.kind == "merged":
            self.input = InputProjection(config.hidden, qkv | mlp, biased_qkv | biased_mlp, make)
            self.output = OutputProjection(config.hidden, o | down, everywhere, make)
        else:
            self.attention_input = InputProjection(config.hidden, qkv, biased_qkv, make)
            self.attention_output = OutputProjection(config.hidden, o, everywhere, make)
            self.mlp_input = InputProjection(config.hidden, mlp, biased_mlp, make)
            self.mlp_output = OutputProjection(config.hidden, down, everywhere, make)
        self.attention = Attention(config, layer, make)

    def forward(self, x_TD: Tensor, context: Context) -> Tensor:
        """The residual stream after this layer: (T, D) -> (T, D)."""
        if self.kind == "serial":
            return self._serial(x_TD, context)
        return self._merged(x_TD, context) if self.kind == "merged" else self._parallel(x_TD, context)

    def _serial(self, x: Tensor, context: Context) -> Tensor:
        inner = self.attention(self.attention_input(self.attention_norm(x)), context)
        x = self._add(self.attention_output, inner, x, context, "attention")
        inner = self.activate(self.mlp_input(self.mlp_norm(x)))
        return self._add(self.mlp_output, inner, x, context, "mlp")

    def _parallel(self, x: Tensor, context: Context) -> Tensor:
        normed = self.norm(x)
        inner = self.attention(self.attention_input(normed), context)
        wide = self.activate(self.mlp_input(normed))
        if context.dropout is None or not self.rate:
            added: Tensor = self.mlp_output(wide, self.attention_output(inner, x))
            return added
        out = self.mlp_output(wide, self.attention_output(inner))
        return x + context.drop(out, self.rate, self.prefix + "block")

    def _merged(self, x: Tensor, context: Context) -> Tensor:
        stacked = self.input(self.norm(x))
        qkv, mlp = stacked.split((self.qkv_rows, stacked.shape[1] - self.qkv_rows), dim=1)
        inner = torch.cat([self.attention(qkv, context), self.activate(mlp)], dim=1)
        return self._add(self.output, inner, x, context, "block")

    def _add(self, output: nn.Module, inner: Tensor, x: Tensor, context: Context, site: str) -> Tensor:
        """The stream plus a projection of `inner`, dropped where training drops; one GEMM writes both otherwise."""
        if context.dropout is None or not self.rate:
            added: Tensor = output(inner, x)
            return added
        return x + context.drop(output(inner), self.rate, self.prefix + site)

    def activate(self, inner_TF: Tensor) -> Tensor:
        """The MLP's nonlinearity: (T, F) -> (T, F), or with a gate (T, 2F) -> (T, F)."""
        if self.activation_name == "swiglu":
            gate, up = inner_TF.chunk(2, dim=1)
            return F.silu(gate) * up
        return F.gelu(inner_TF, approximate="tanh" if self.activation_name == "gelu_tanh" else "none")


class Decoder(nn.Module):
    """A decoder-only transformer, uninitialised (see `phalanx.model.init`).

    Args:
        config: with `vocab_size` and `max_sequence` known.
        device: where the weights are; ``"meta"`` allocates none.
        dtype: of the stored weights.
        compute_dtype: of matrix products and attention; None = `dtype`.

    Attributes:
        recompute: what the backward pass computes again instead of keeping: ``"none"``; ``"selective"`` (all but the
            results of matrix products and attention); ``"full"`` (everything but each block's input). Gradients are the
            same bits.

    Raises:
        UserError: `vocab_size` or `max_sequence` is not known.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config.require_sizes()
        self.config = config
        self.compute_dtype = compute_dtype or dtype
        self.residual_dtype = self.compute_dtype if config.residual == "compute" else dtype
        self.recompute: Recompute = "none"
        make = Make(None if device is None else torch.device(device), dtype, self.compute_dtype)
        self.embedding = Embedding(config, make)
        self.rotary = Rotary(config) if config.position == "rotary" else None
        self.layers = nn.ModuleList(Block(config, layer, make) for layer in range(config.layers))
        self.norm = Norm(config, "norm", make)
        self.head = LossHead(config, make, self.embedding.weight if config.tie_embeddings else None)

    def forward(
        self,
        tokens_BS: Tensor,
        *,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        dropout: DropoutState | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Hidden states after the last norm.

        Args:
            tokens_BS: int64 token ids.
            positions_BS: int64 positions; None = 0, 1, 2 … (after what the cache holds).
            documents_BS: integers; attention stays among equal ones. None = a sequence is one document.
            dropout: what to drop in training; None drops nothing.
            cache: keys and values of earlier tokens; extended by these.

        Returns:
            (B, S, D) in compute dtype.

        Raises:
            UserError: the sequence is longer than `max_sequence`, or documents are given with a cache.
        """
        start = 0 if cache is None else cache.length
        self._check(tokens_BS, start, positions_BS, documents_BS, cache)
        context = self._context(tokens_BS, start, positions_BS, documents_BS, dropout, cache)
        x_TD = self.embedding(tokens_BS, start, positions_BS).to(self.residual_dtype)
        x_TD = context.drop(x_TD, self.config.dropout, "embedding")
        run = self._runner()
        for block in self.layers:
            x_TD = run(block, x_TD, context)
        if cache is not None:
            cache.advance(tokens_BS.shape[1])
        hidden: Tensor = self.norm(x_TD)
        return hidden.view(*tokens_BS.shape, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits (..., V) of hidden states (..., D); those of padding, behind `vocab_size`, are -inf."""
        return self.head.logits(hidden)

    def loss(self, hidden_BSD: Tensor, targets_BS: Tensor, weights_BS: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weighted sums over tokens of the cross-entropy (nats) and of the z-loss; the objective is their sum.

        Args:
            targets_BS: int64 next tokens.
            weights_BS: float32 token weights; None = 1.

        Returns:
            (loss_sum, z_sum), float32 scalars.
        """
        weights = None if weights_BS is None else weights_BS.flatten()
        sums: tuple[Tensor, Tensor] = self.head(hidden_BSD.flatten(0, 1), targets_BS.flatten(), weights)
        return sums

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `max_length` tokens."""
        device = self.embedding.weight.device
        return KVCache(self.config, batch, max_length, dtype=self.compute_dtype, device=device)

    def _check(
        self,
        tokens_BS: Tensor,
        start: int,
        positions_BS: Tensor | None,
        documents_BS: Tensor | None,
        cache: KVCache | None,
    ) -> None:
        end = start + tokens_BS.shape[1]
        if positions_BS is None and self.config.position != "none" and end > self.config.max_sequence:
            raise too_long(self.config, end)
        if cache is not None and documents_BS is not None:
            raise UserError("documents cannot be kept apart in a cache", cure="generate one document at a time")

    def _context(
        self,
        tokens_BS: Tensor,
        start: int,
        positions_BS: Tensor | None,
        documents_BS: Tensor | None,
        dropout: DropoutState | None,
        cache: KVCache | None,
    ) -> Context:
        batch, length = tokens_BS.shape
        windows = {self.config.window_of(layer) for layer in range(self.config.layers)} if cache is None else set()
        return Context(
            batch=batch,
            length=length,
            rotary=None if self.rotary is None else self.rotary(start, length, positions_BS, tokens_BS),
            masks={w: AttentionMask(length, length, window=w, documents_BS=documents_BS) for w in windows},
            dropout=dropout,
            rows_T=None if dropout is None else dropout_rows(dropout, length, self.config.max_sequence),
            cache=cache,
        )

    def _runner(self) -> Callable[[nn.Module, Tensor, Context], Tensor]:
        """How a block is run: plainly, or so that the backward pass computes parts of it again."""
        if self.recompute == "none" or not torch.is_grad_enabled():
            return lambda block, x, context: block(x, context)
        if self.recompute == "full":
            return lambda block, x, context: checkpoint(
                block, x, context, use_reentrant=False, preserve_rng_state=False
            )
        return lambda block, x, context: checkpoint(
            block, x, context, use_reentrant=False, preserve_rng_state=False, context_fn=selective_contexts
        )
