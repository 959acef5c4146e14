"""One decoder for every architecture that `ModelConfig` can declare, and any run of its layers; single-device code.

What a pipeline stage receives and sends, and how its matrices are split, is decided outside, through the seams of
`phalanx.model.layers`.

Precision: weights are float32 masters, cast where a GEMM uses them; GEMMs, attention and activations run in
`compute_dtype`; norms, softmax, loss and by default the residual stream in float32.

Shapes: B batch, S sequence, T tokens (B*S), D hidden, F inner width of the MLP, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.kernels.attention import CausalKernel, prepare
from phalanx.kernels.attention_trial import Layout, Shape
from phalanx.kernels.fp8 import requantise
from phalanx.kernels.masks import AttentionMask
from phalanx.kernels.pointwise import swiglu
from phalanx.model.config import ModelConfig
from phalanx.model.forward_context import (
    CachePass,
    Context,
    DropoutState,
    KVCache,
    Site,
    call,
    call_untraced,
    compile_layers,
    dropout_rows,
)
from phalanx.model.layers import Attention, Embedding, InputProjection, LossHead, Make, Matrix, Norm, OutputProjection
from phalanx.model.offload import Offload
from phalanx.model.recompute import CHOOSING, Recompute, first_product, recomputed
from phalanx.model.rotary import Rotary, too_long


class Block(nn.Module):
    """One layer: serial, parallel, or parallel with merged projections. The parts differ, not the class."""

    def __init__(self, config: ModelConfig, layer: int, make: Make) -> None:
        super().__init__()
        self.number = layer
        prefix = f"layers.{layer}."
        size, kv_rows = config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {f"{prefix}attention.{n}": r for n, r in (("q", config.heads * size), ("k", kv_rows), ("v", kv_rows))}
        mlp = {f"{prefix}mlp.{name}": config.mlp_width for name in (("gate", "up") if config.gated else ("up",))}
        o, down = {f"{prefix}attention.o": config.heads * size}, {f"{prefix}mlp.down": config.mlp_width}
        biased_qkv = qkv if config.bias != "none" else {}
        biased_mlp = mlp if config.bias == "all" else {}
        everywhere = config.bias == "all"
        self.kind = "merged" if config.merged else config.block
        self.recompute: Recompute = "none"
        self.rate, self.activation = config.dropout, config.activation
        self.attention_site, self.mlp_site, self.site = (Site(prefix + name) for name in ("attention", "mlp", "block"))
        self.qkv_rows = sum(qkv.values())
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
        # These two methods are what is compiled (`compile_layers`): where the compiler chooses what is kept, it has to
        # see the choice and the layer as one; elsewhere recomputation stays outside.
        if self.recompute in CHOOSING:
            return self.choosing(x_TD, context)
        if self.recompute == "none":
            return self.layer(x_TD, context)
        return recomputed(self.recompute, lambda x: self.layer(x, context), x_TD)

    def choosing(self, x_TD: Tensor, context: Context) -> Tensor:
        """`layer`, with the choice of which of its results are kept for the backward pass."""
        return recomputed(self.recompute, lambda x: Block.layer(self, x, context), x_TD)

    def layer(self, x_TD: Tensor, context: Context) -> Tensor:
        """What `forward` does, recomputation aside."""
        x = x_TD
        if self.kind == "serial":
            inner = self.attention(self.attention_input(self.attention_norm(x)), context)
            x = self._add(self.attention_output, inner, x, context, self.attention_site)
            inner = self._activate(self._first_product(self.mlp_input, self.mlp_norm(x)))
            return self._add(self.mlp_output, inner, x, context, self.mlp_site)
        if self.kind == "merged":  # one GEMM reads the stream, one writes it
            stacked = self._first_product(self.input, self.norm(x))
            qkv, mlp = stacked.split((self.qkv_rows, stacked.shape[1] - self.qkv_rows), dim=1)
            inner = torch.cat([self.attention(qkv, context), self._activate(mlp)], dim=1)
            return self._add(self.output, inner, x, context, self.site)
        # Parallel: both branches read one norm, so that tensor-parallel ranks gather once and scatter once; the second
        # output projection adds to what the first gives.
        normed = self.norm(x)
        inner = self.attention(self.attention_input(normed), context)
        wide = self._activate(self._first_product(self.mlp_input, normed))
        if context.dropout is None or not self.rate:
            added: Tensor = self.mlp_output(wide, self.attention_output(inner, x))
            return added
        return x + context.drop(self.mlp_output(wide, self.attention_output(inner)), self.rate, self.site)

    def _first_product(self, make: nn.Module, x: Tensor) -> Any:
        # Marked only where the mark is read: what is compiled must not depend on the level, or it is compiled again.
        if torch.compiler.is_compiling() or self.recompute != "mlp":
            return make(x)
        return first_product(make, x)

    def _add(self, output: nn.Module, inner: Tensor, x: Tensor, context: Context, site: Site) -> Tensor:
        if context.dropout is None or not self.rate:
            added: Tensor = output(inner, x)  # one GEMM makes the product and adds the stream
            return added
        return x + context.drop(output(inner), self.rate, site)

    def _activate(self, inner_TF: Tensor) -> Tensor:
        """(T, F) -> (T, F), or with a gate (T, 2F) -> (T, F)."""
        if self.activation == "swiglu":
            return swiglu(inner_TF)
        return F.gelu(inner_TF, approximate="tanh" if self.activation == "gelu_tanh" else "none")


def _check_types(config: Any, layers: Any, device: Any, dtypes: Mapping[str, Any], fp8_layers: Any) -> None:
    """Refuse what torch or Python would stumble over further in, by the name of the argument."""

    def refused(problem: str, cure: str, field: str, value: Any) -> UserError:
        return UserError(problem, cure=cure, field=field, value=value)

    if not isinstance(config, ModelConfig):
        raise refused("is not the config of a model", "give a phalanx.model.config.ModelConfig", "config", config)
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise refused("is not a floating-point dtype of torch", "give one such as torch.bfloat16", name, dtype)
    if device is not None:
        try:
            torch.device(device)
        except (RuntimeError, TypeError):
            raise refused("is not a device of torch", "give cpu, cuda, cuda:1 or meta", "device", device) from None
    if layers is not None:
        is_range = isinstance(layers, range)
        if not is_range or not all(0 <= layer < config.layers for layer in (*layers[:1], *layers[-1:])):
            cure = f"give a range within the model's {config.layers}, such as range(0, {config.layers})"
            raise refused("are not layers of the model", cure, "layers", layers)
    if not hasattr(fp8_layers, "__contains__") or isinstance(fp8_layers, str):
        raise refused("is not a set of layers", "give a range or a list of their numbers", "fp8_layers", fp8_layers)


class DecoderPart(nn.Module):
    """A run of layers, perhaps with the embedding before it or the loss head behind it; its weights are uninitialised.

    Raises:
        UserError: `vocab_size` or `max_sequence` is not known.
    """

    embedding: Embedding | None
    norm: Norm | None
    head: LossHead | None

    def __init__(
        self,
        config: ModelConfig,  # of the whole decoder, with `vocab_size` and `max_sequence` known
        *,
        layers: range | None = None,  # which layers; None: all
        first: bool = True,  # whether the embedding belongs to it
        # whether the last norm and the loss head do. Where embeddings are tied and `first` is False, the head has a
        # copy of the embedding's weight, under the same logical name
        last: bool = True,
        device: torch.device | str | None = None,  # where the weights are; ``"meta"`` allocates none
        dtype: torch.dtype = torch.float32,  # of the stored weights
        compute_dtype: torch.dtype | None = None,  # of matrix products and attention; None = `dtype`
        fp8_layers: Container[int] = (),  # those whose matrices are multiplied in 8 bits
    ) -> None:
        super().__init__()
        _check_types(config, layers, device, {"dtype": dtype, "compute_dtype": compute_dtype}, fp8_layers)
        config.require_sizes()
        self.config = config
        self.compute_dtype = compute_dtype or dtype
        self.residual_dtype = self.compute_dtype if config.residual == "compute" else dtype
        self._apart = call
        # For plain causal attention on CUDA, tested by the run; None: what torch prefers.
        self.causal_kernel: CausalKernel | None = None
        # Moves activations to the host meanwhile (`phalanx.model.offload`); None: they stay.
        self.offload: Offload | None = None
        make = Make(None if device is None else torch.device(device), dtype, self.compute_dtype)
        self.embedding = Embedding(config, make) if first else None
        self.rotary = Rotary(config) if config.position == "rotary" else None
        chosen = range(config.layers) if layers is None else layers
        self._windows = {config.window_of(layer) for layer in range(config.layers)}
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
        """Keep casts of matrices beside the stored ones; call `weights_changed` whenever those have new values."""
        for module in self.modules():
            if isinstance(module, Matrix):
                module.hold_cast()
        self.weights_changed()

    @torch.no_grad()
    def weights_changed(self) -> None:
        """Make the kept casts anew."""
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
        cache: CachePass | None = None,
    ) -> Context:
        """The constants of one forward pass over `tokens_BS`; arguments as of `Decoder.forward`."""
        batch, length = tokens_BS.shape
        # A pass that sees cached keys too takes its mask from the cache. Layers of one kind share a mask, and what
        # kernels make of it.
        alone = cache is None or cache.is_first
        windows = self._windows if alone else set()
        masks = {w: AttentionMask(length, length, window=w, documents_BS=documents_BS) for w in windows}
        drops = dropout is not None and self.config.attention_dropout > 0
        for mask in masks.values():
            # Compiled layers ask for FlexAttention's block masks while they are traced, which would be too late.
            backend, kernel = self.config.attention_backend, self.causal_kernel
            prepare(mask, tokens_BS.device, backend, has_dropout=drops, kernel=kernel)
        return Context(
            batch=batch,
            length=length,
            rotary=None if self.rotary is None else self.rotary(length, positions_BS, tokens_BS),
            masks=masks,
            dropout=dropout,
            rows_T=None if dropout is None else dropout_rows(dropout, length, self.config.max_sequence),
            cache=cache,
            apart=self._apart,
            kernel=self.causal_kernel,
        )

    def attention_shape(self, batch: int, length: int) -> Shape:
        """The shape of a layer's attention, for a trial of kernels."""
        config = self.config
        # Norms write queries and keys anew; rotation, where it splits the projection itself, values too.
        anew = config.position == "rotary" or config.qk_norm
        layout: Layout = "all" if not anew else "values" if config.qk_norm else "none"
        sizes = config.heads, config.num_kv_heads, length, config.head_dim
        return Shape(batch, *sizes, self.compute_dtype, layout)

    def embed(self, tokens_BS: Tensor, context: Context, *, positions_BS: Tensor | None = None) -> Tensor:
        """The residual stream before the first layer, (T, D)."""
        assert self.embedding is not None, "this part begins after the embedding"
        # Float32 by default, because bf16 (8 bits of mantissa) rounds away a block's small update to a large stream,
        # more so the deeper the model.
        x_TD = self.embedding(tokens_BS, positions_BS).to(self.residual_dtype)
        return context.drop(x_TD, self.config.dropout, Site("embedding"))

    def blocks(self, x_TD: Tensor, context: Context) -> Tensor:
        """The residual stream after this part's layers: (T, D) -> (T, D)."""
        if self.offload is None or not torch.is_grad_enabled():
            for block in self.layers:
                x_TD = block(x_TD, context)
            return x_TD
        # Weights, their casts and rotary tables are saved for the backward pass as well, but stay on the device.
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
    """A whole decoder-only transformer, uninitialised (`phalanx.model.logical_parameters.initialise` fills it)."""

    embedding: Embedding
    norm: Norm
    head: LossHead

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
        end = length if cache is None else cache.length + length
        if positions_BS is None and self.config.position != "none" and end > self.config.max_sequence:
            raise too_long(self.config, end)
        if cache is not None and documents_BS is not None:
            raise UserError("documents cannot be kept apart in a cache", cure="generate one document at a time")
        if cache is not None and cache.length and positions_BS is None:
            positions_BS = cache.positions(length)
        kept = None if cache is None else cache.begin(length, lengths_B)
        context = self.context(
            tokens_BS, positions_BS=positions_BS, documents_BS=documents_BS, dropout=dropout, cache=kept
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
        """Weighted sums over tokens of the cross-entropy (nats) and of the z-loss, float32; the objective is their sum.

        Args:
            targets_BS: int64 next tokens.
            weights_BS: float32 token weights; None = 1.
        """
        weights = None if weights_BS is None else weights_BS.flatten()
        return self.sums(hidden_BSD.flatten(0, 1), targets_BS.flatten(), weights)

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `max_length` tokens."""
        device = self.embedding.weight.device
        return KVCache(self.config, batch, max_length, dtype=self.compute_dtype, device=device)
