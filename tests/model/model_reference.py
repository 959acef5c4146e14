"""A straightforward decoder from logical weights: one matrix at a time, full masks, no fusion; the tests' yardstick."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model.config import ModelConfig


def reference_logits(
    config: ModelConfig, weights: Mapping[str, Tensor], tokens: Tensor, documents: Tensor | None = None
) -> Tensor:
    x = weights["embedding"][tokens]
    if config.position == "learned":
        x = x + weights["position_embedding"][: tokens.shape[1]]
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        if config.block == "parallel":
            h = _norm(config, weights, prefix + "norm", x)
            x = x + _mlp(config, weights, prefix + "mlp.", h) + _attention(config, weights, layer, h, documents)
        else:
            x = x + _attention(config, weights, layer, _norm(config, weights, prefix + "attention.norm", x), documents)
            x = x + _mlp(config, weights, prefix + "mlp.", _norm(config, weights, prefix + "mlp.norm", x))
    x = _norm(config, weights, "norm", x)
    logits = x @ weights["embedding" if config.tie_embeddings else "head"].T
    cap = config.logit_softcap
    logits = cap * torch.tanh(logits / cap) if cap else logits
    padding = torch.arange(logits.shape[-1]) >= config.vocab_size
    return logits.masked_fill(padding, -torch.inf)


def _norm(config: ModelConfig, weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    if config.norm == "rms":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * weights[name]
    centred = x - x.mean(-1, keepdim=True)
    out = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + config.norm_eps) * weights[name]
    return out + weights.get(name + "_bias", 0)


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[name].T + weights.get(name + "_bias", 0)


def _output(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[name] + weights.get(name + "_bias", 0)


def _mlp(config: ModelConfig, weights: Mapping[str, Tensor], prefix: str, h: Tensor) -> Tensor:
    up = _linear(weights, prefix + "up", h)
    if config.activation == "swiglu":
        inner = F.silu(_linear(weights, prefix + "gate", h)) * up
    else:
        inner = F.gelu(up, approximate="tanh" if config.activation == "gelu_tanh" else "none")
    return _output(weights, prefix + "down", inner)


def _attention(
    config: ModelConfig, weights: Mapping[str, Tensor], layer: int, h: Tensor, documents: Tensor | None
) -> Tensor:
    prefix = f"layers.{layer}.attention."
    size, batch, length = config.head_dim, h.shape[0], h.shape[1]
    q, k, v = (_linear(weights, prefix + n, h).view(batch, length, -1, size).transpose(1, 2) for n in "qkv")
    if config.qk_norm:
        q, k = (_rms(x, weights[prefix + n], config.norm_eps) for x, n in ((q, "q_norm"), (k, "k_norm")))
    if config.position == "rotary":
        q, k = _rotary(q, config.rope_theta), _rotary(k, config.rope_theta)
    k, v = (x.repeat_interleave(config.heads // config.num_kv_heads, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / size**0.5
    scores = scores.masked_fill(~_seen(length, config.window_of(layer), documents), float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1)
    return _output(weights, prefix + "o", out)


def _seen(length: int, window: int | None, documents: Tensor | None) -> Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    seen = (distance >= 0) & (distance < (window or length))
    return seen if documents is None else (seen & (documents[:, :, None] == documents[:, None, :]))[:, None]


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _rotary(x: Tensor, theta: float) -> Tensor:
    """Pairs (i, i + E/2) as complex numbers turned by position * theta^(-2i/E)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(half) / half)[None, :]
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(
        torch.ones_like(angles, dtype=torch.double), angles.double()
    )
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)
