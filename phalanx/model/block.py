"""One layer of a decoder, in every variant that `ModelConfig` can declare; single-device code.

Shapes: T tokens, D hidden, F inner width of the MLP.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.kernels.pointwise import swiglu
from phalanx.model.config import ModelConfig
from phalanx.model.forward_context import Context, Site
from phalanx.model.layers import Attention, InputProjection, Make, Norm, OutputProjection
from phalanx.model.recompute import CHOOSING, Recompute, first_product, recomputed


class Block(nn.Module):
    """One layer. Serial, parallel, or parallel with merged projections: the parts differ, not the class.

    Attributes:
        recompute: what its backward pass computes again (`phalanx.model.recompute`).
    """

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
        self.recompute: Recompute = "none"
        self.rate, self.activation_name = config.dropout, config.activation
        self.attention_site, self.mlp_site, self.site = (Site(prefix + name) for name in ("attention", "mlp", "block"))
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
        if self.recompute in CHOOSING:
            return self.choosing(x_TD, context)
        return recomputed(self.recompute, lambda x: self.layer(x, context), x_TD)

    def choosing(self, x_TD: Tensor, context: Context) -> Tensor:
        """`layer` with the choice of what is kept of it, which one compiler has to see together."""
        return recomputed(self.recompute, lambda x: Block.layer(self, x, context), x_TD)

    def layer(self, x_TD: Tensor, context: Context) -> Tensor:
        """What `forward` does, without a thought for memory."""
        if self.kind == "serial":
            return self._serial(x_TD, context)
        return self._merged(x_TD, context) if self.kind == "merged" else self._parallel(x_TD, context)

    def _serial(self, x: Tensor, context: Context) -> Tensor:
        inner = self.attention(self.attention_input(self.attention_norm(x)), context)
        x = self._add(self.attention_output, inner, x, context, self.attention_site)
        inner = self.activate(first_product(self.mlp_input, self.mlp_norm(x)))
        return self._add(self.mlp_output, inner, x, context, self.mlp_site)

    def _parallel(self, x: Tensor, context: Context) -> Tensor:
        normed = self.norm(x)
        inner = self.attention(self.attention_input(normed), context)
        wide = self.activate(first_product(self.mlp_input, normed))
        if context.dropout is None or not self.rate:
            added: Tensor = self.mlp_output(wide, self.attention_output(inner, x))
            return added
        out = self.mlp_output(wide, self.attention_output(inner))
        return x + context.drop(out, self.rate, self.site)

    def _merged(self, x: Tensor, context: Context) -> Tensor:
        stacked = first_product(self.input, self.norm(x))
        qkv, mlp = stacked.split((self.qkv_rows, stacked.shape[1] - self.qkv_rows), dim=1)
        inner = torch.cat([self.attention(qkv, context), self.activate(mlp)], dim=1)
        return self._add(self.output, inner, x, context, self.site)

    def _add(self, output: nn.Module, inner: Tensor, x: Tensor, context: Context, site: Site) -> Tensor:
        """The stream plus a projection of `inner`, dropped where training drops; one GEMM writes both otherwise."""
        if context.dropout is None or not self.rate:
            added: Tensor = output(inner, x)
            return added
        return x + context.drop(output(inner), self.rate, site)

    def activate(self, inner_TF: Tensor) -> Tensor:
        """The MLP's nonlinearity: (T, F) -> (T, F), or with a gate (T, 2F) -> (T, F)."""
        if self.activation_name == "swiglu":
            return swiglu(inner_TF)
        return F.gelu(inner_TF, approximate="tanh" if self.activation_name == "gelu_tanh" else "none")
