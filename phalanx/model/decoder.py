"""One decoder for every architecture that `ModelConfig` can declare, and any run of its layers; single-device code.

A `DecoderPart` is a run of layers, with the embedding before it or the loss head after it, or both, or neither.

A whole decoder is the part that has everything; a pipeline stage is a smaller one. Single-device code: what a stage
receives and sends, and how its matrices are split, is decided outside.

Shapes: B batch, S sequence, T tokens (B*S), D hidden, V vocabulary rows.

Precision: weights are float32 masters, cast where a GEMM uses them; GEMMs, attention and activations run in
`compute_dtype`; norms, softmax and loss in float32; the residual stream in float32 by default, because bf16 (8 bits of
mantissa) rounds away a block's small update to a large stream, more so the deeper the model. Parallelism is applied
from outside through the seams of `phalanx.model.layers`.

Shapes: B batch, S sequence, T tokens (B*S), D hidden, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.kernels.attention import CausalKernel, prepare
from phalanx.kernels.attention_trial import Shape
from phalanx.kernels.fp8 import requantise
from phalanx.kernels.masks import AttentionMask
from phalanx.model.block import Block
from phalanx.model.cache import KVCache
from phalanx.model.config import ModelConfig
from phalanx.model.forward_context import Context, DropoutState, Site, call, call_untraced, compile_layers, dropout_rows
from phalanx.model.layers import Embedding, LossHead, Make, Matrix, Norm
from phalanx.model.offload import Offload
from phalanx.model.recompute import Recompute
from phalanx.model.rotary import Rotary, too_long


class DecoderPart(nn.Module):
    """Layers ``layers`` of a decoder, uninitialised (see `phalanx.model.logical_parameters`).

    Args:
        config: of the whole decoder, with `vocab_size` and `max_sequence` known.
        layers: which layers; None: all.
        first: whether the embedding belongs to it.
        last: whether the last norm and the loss head do. Where embeddings are tied and `first` is False, the head has
            a copy of the embedding's weight, under the same logical name.
        device: where the weights are; ``"meta"`` allocates none.
        dtype: of the stored weights.
        compute_dtype: of matrix products and attention; None = `dtype`.
        fp8_layers: those whose matrices are multiplied in 8 bits.

    Attributes:
        causal_kernel: of plain causal attention on CUDA, where one was found to be right; None: what torch prefers.
        offload: takes activations to the host meanwhile, see `phalanx.model.offload`; None: they stay.

    Raises:
        UserError: `vocab_size` or `max_sequence` is not known.
    """

    embedding: Embedding | None
    norm: Norm | None
    head: LossHead | None

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        fp8_layers: Container[int] = (),
    ) -> None:
        super().__init__()
        config.require_sizes()
        self.config = config
        self.compute_dtype = compute_dtype or dtype
        self.residual_dtype = self.compute_dtype if config.residual == "compute" else dtype
        self._apart = call
        self.causal_kernel: CausalKernel | None = None
        self.offload: Offload | None = None
        make = Make(None if device is None else torch.device(device), dtype, self.compute_dtype)
        self.embedding = Embedding(config, make) if first else None
        self.rotary = Rotary(config) if config.position == "rotary" else None
        chosen = range(config.layers) if layers is None else layers
        self.layers = nn.ModuleList(Block(config, n, make._replace(fp8=n in fp8_layers)) for n in chosen)
        self.norm = Norm(config, "norm", make) if last else None
        tied = self.embedding.weight if config.tie_embeddings and self.embedding is not None else None
        self.head = LossHead(config, make, tied) if last else None

    def set_recompute(self, what: Recompute) -> None:
        """What the backward pass of every layer computes again (`phalanx.model.recompute`)."""
        for block in self.layers:
            assert isinstance(block, Block)
            block.recompute = what

    def compile(self, **options: Any) -> None:
        """Compile each layer by torch.compile (`phalanx.model.forward_context`)."""
        self._apart = call_untraced()
        compile_layers(self.layers, **options)

    def hold_casts(self) -> None:
        """Keep matrices in the compute dtype beside the stored ones, instead of casting them at every use.

        Whoever asks for it calls `weights_changed` whenever weights have other values.
        """
        for module in self.modules():
            if isinstance(module, Matrix):
                module.hold_cast()
        self.weights_changed()

    @torch.no_grad()
    def weights_changed(self) -> None:
        """Make the casts that are kept anew."""
        matrices = [m for m in self.modules() if isinstance(m, Matrix)]
        held = [(m.cast, m.weight) for m in matrices if m.cast is not None]
        if held:
            torch._foreach_copy_([cast for cast, _ in held], [weight for _, weight in held])
        requantise([(m.weight, m.quantised) for m in matrices if m.quantised is not None])

    def context(
        self,
        tokens_BS: Tensor,
        *,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        dropout: DropoutState | None = None,
        cache: KVCache | None = None,
        lengths_B: Tensor | None = None,
    ) -> Context:
        """The constants of one forward pass over `tokens_BS`; arguments as of `Decoder.forward`."""
        batch, length = tokens_BS.shape
        alone = cache is None or cache.length == 0
        windows = {self.config.window_of(layer) for layer in range(self.config.layers)} if alone else set()
        masks = {w: AttentionMask(length, length, window=w, documents_BS=documents_BS) for w in windows}
        drops = dropout is not None and self.config.attention_dropout > 0
        for mask in masks.values():
            backend, kernel = self.config.attention_backend, self.causal_kernel
            prepare(mask, tokens_BS.device, backend, has_dropout=drops, kernel=kernel)
        return Context(
            batch=batch,
            length=length,
            rotary=None if self.rotary is None else self.rotary(length, positions_BS, tokens_BS),
            masks=masks,
            dropout=dropout,
            rows_T=None if dropout is None else dropout_rows(dropout, length, self.config.max_sequence),
            cache=None if cache is None else cache.begin(length, lengths_B),
            apart=self._apart,
            kernel=self.causal_kernel,
        )

    def attention_shape(self, batch: int, length: int) -> Shape:
        """What a layer asks of attention, for a trial of kernels."""
        config = self.config
        is_made_anew = config.position == "rotary" or config.qk_norm  # queries and keys, by what comes before
        layout: Literal["values", "all"] = "values" if is_made_anew else "all"
        sizes = config.heads, config.num_kv_heads, length, config.head_dim
        return Shape(batch, *sizes, self.compute_dtype, layout)

    def embed(self, tokens_BS: Tensor, context: Context, *, positions_BS: Tensor | None = None) -> Tensor:
        """The residual stream before the first layer, (T, D)."""
        assert self.embedding is not None, "this part begins after the embedding"
        x_TD = self.embedding(tokens_BS, positions_BS).to(self.residual_dtype)
        return context.drop(x_TD, self.config.dropout, Site("embedding"))

    def blocks(self, x_TD: Tensor, context: Context) -> Tensor:
        """The residual stream after this part's layers: (T, D) -> (T, D)."""
        if self.offload is None or not torch.is_grad_enabled():
            for block in self.layers:
                x_TD = block(x_TD, context)
            return x_TD
        shared = [*(context.rotary or ()), *(t for m in self.modules() if isinstance(m, Matrix) for t in m.held())]
        leaving = self.offload.forward_pass(len(self.layers), shared)
        for index, block in enumerate(self.layers):
            with leaving.layer(index, block):
                x_TD = block(x_TD, context)
        leaving.end()
        return x_TD

    def sums(self, hidden_TD: Tensor, targets_T: Tensor, weights_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weighted sums over tokens of the cross-entropy (nats) and of the z-loss, of normed hidden states."""
        assert self.head is not None, "this part ends before the head"
        sums: tuple[Tensor, Tensor] = self.head(hidden_TD, targets_T, weights_T)
        return sums


class Decoder(DecoderPart):
    """A decoder-only transformer, uninitialised (see `phalanx.model.logical_parameters`): the part that has everything.

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
