"""One decoder for every architecture that `ModelConfig` can declare; single-device code, no process groups, no globals.

Precision: weights are float32 masters, cast where a GEMM uses them; GEMMs, attention and activations run in
`compute_dtype`; norms, softmax and loss in float32; the residual stream in float32 by default, because bf16 (8 bits of
mantissa) rounds away a block's small update to a large stream, more so the deeper the model. Parallelism is applied
from outside through the seams of `phalanx.model.layers`.

Shapes: B batch, S sequence, T tokens (B*S), D hidden, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.model.cache import KVCache
from phalanx.model.config import ModelConfig
from phalanx.model.context import DropoutState
from phalanx.model.layers import Embedding, LossHead, Norm
from phalanx.model.part import DecoderPart
from phalanx.model.rotary import too_long


class Decoder(DecoderPart):
    """A decoder-only transformer, uninitialised (see `phalanx.model.init`): the part that has everything.

    Args:
        config: with `vocab_size` and `max_sequence` known.
        device: where the weights are; ``"meta"`` allocates none.
        dtype: of the stored weights.
        compute_dtype: of matrix products and attention; None = `dtype`.
        fp8_layers: those whose matrices are multiplied in 8 bits.

    Raises:
        UserError: `vocab_size` or `max_sequence` is not known.
    """

    embedding: Embedding
    norm: Norm
    head: LossHead

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        fp8_layers: Container[int] = (),
    ) -> None:
        super().__init__(config, device=device, dtype=dtype, compute_dtype=compute_dtype, fp8_layers=fp8_layers)

    def forward(
        self,
        tokens_BS: Tensor,
        *,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        dropout: DropoutState | None = None,
        cache: KVCache | None = None,
        lengths_B: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last norm.

        Args:
            tokens_BS: int64 token ids.
            positions_BS: int64 positions; None = 0, 1, 2 … (after what the cache holds).
            documents_BS: integers; attention stays among equal ones. None = a sequence is one document.
            dropout: what to drop in training; None drops nothing.
            cache: keys and values of earlier tokens; extended by these.
            lengths_B: with a cache, how many tokens of each row it takes; those behind them are padding. None = all.

        Returns:
            (B, S, D) in compute dtype.

        Raises:
            UserError: the sequence is longer than `max_sequence` or than the cache, or documents are given with one.
        """
        length = tokens_BS.shape[1]
        self._check(length, positions_BS, documents_BS, cache)
        if cache is not None and cache.length and positions_BS is None:
            positions_BS = cache.positions(length)
        context = self.context(
            tokens_BS,
            positions_BS=positions_BS,
            documents_BS=documents_BS,
            dropout=dropout,
            cache=cache,
            lengths_B=lengths_B,
        )
        x_TD = self.blocks(self.embed(tokens_BS, context, positions_BS=positions_BS), context)
        if cache is not None:
            cache.advance(length, lengths_B)
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
        return self.sums(hidden_BSD.flatten(0, 1), targets_BS.flatten(), weights)

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `max_length` tokens."""
        device = self.embedding.weight.device
        return KVCache(self.config, batch, max_length, dtype=self.compute_dtype, device=device)

    def _check(
        self,
        length: int,
        positions_BS: Tensor | None,
        documents_BS: Tensor | None,
        cache: KVCache | None,
    ) -> None:
        end = length if cache is None else cache.length + length
        if positions_BS is None and self.config.position != "none" and end > self.config.max_sequence:
            raise too_long(self.config, end)
        if cache is not None and documents_BS is not None:
            raise UserError("documents cannot be kept apart in a cache", cure="generate one document at a time")
