"""Rotary positions (arXiv 2104.09864), with the frequency scalings of Llama 3.1 and YaRN.

The first and second half of a head form the pairs, as in Hugging Face's checkpoints; frequencies are made in float32
by the same operations as theirs, so that long positions agree too. Shapes: B batch, S sequence, N heads, E head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.kernels.pointwise import rotate_heads_gradient, rotated
from phalanx.model.config import ModelConfig, RopeScaling


class Rotary(nn.Module):
    """Tables of cos and sin for every position below `max_sequence`; built on first use on the device that asks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.cos_PE: Tensor | None = None
        self.sin_PE: Tensor | None = None

    def forward(self, length: int, positions_BS: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 cos and sin for the first `length` positions, or for `positions_BS`, broadcastable over heads.

        Returns:
            Two tensors (S, 1, E/2), or (B, S, 1, E/2) with `positions_BS`, which are not checked.

        Raises:
            UserError: `length` is more than `max_sequence`.
        """
        if positions_BS is None and length > self.config.max_sequence:
            raise too_long(self.config, length)
        cos, sin = self.tables(like.device)
        if positions_BS is not None:
            return cos[positions_BS].unsqueeze(-2), sin[positions_BS].unsqueeze(-2)
        return cos[:length].unsqueeze(-2), sin[:length].unsqueeze(-2)

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Float32 cos and sin of all positions, (P, E/2) each."""
        if self.cos_PE is None or self.sin_PE is None or self.cos_PE.device != device:
            with torch.inference_mode(False), torch.no_grad():  # The tables outlive a first use in inference.
                frequencies, scale = rotary_frequencies(self.config)
                angles = torch.outer(torch.arange(self.config.max_sequence, dtype=torch.float32), frequencies)
                self.cos_PE, self.sin_PE = (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)
        return self.cos_PE, self.sin_PE


def too_long(config: ModelConfig, length: int) -> UserError:
    """The error for a sequence beyond the model's longest."""
    cure = f"shorten the sequence to {config.max_sequence} tokens, or raise model.max_sequence"
    return UserError(f"is too short for a sequence of {length} tokens", cure=cure, field="model.max_sequence",
                     value=config.max_sequence)  # fmt: skip


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Angular frequencies (E/2,) in radians per position, and the factor on cos and sin."""
    scaling, size = config.rope_scaling, config.head_dim
    exponent = torch.arange(0, size, 2, dtype=torch.int64).to(torch.float32) / size
    frequencies = 1.0 / (config.rope_theta**exponent)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, config.rope_theta), attention_factor(scaling)
    if scaling.kind == "none":
        return frequencies, 1.0
    # Llama 3: long waves are stretched by `factor`, short ones kept, those between blended by their turns per context.
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    context = scaling.original_max_position
    wavelength = 2 * math.pi / frequencies
    stretched = torch.where(wavelength > context / low, frequencies / scaling.factor, frequencies)
    # Between both bounds `stretched` still has the plain frequencies.
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    between = ~(wavelength < context / high) * ~(wavelength > context / low)
    return torch.where(between, blended, stretched), 1.0


def _yarn(frequencies: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    """Blend kept and stretched frequencies along a linear ramp over dimensions (YaRN, section 3.2)."""
    size = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        return size * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    # Whole dimensions, as in the paper's code; gpt-oss leaves the bounds as they come.
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    # As the reference does where both bounds are one: a step instead of a division by zero.
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    kept = 1 - ramp
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept


def attention_factor(scaling: RopeScaling) -> float:
    """YaRN's factor on cos and sin: as set, or derived from `factor` (and the two mscales when both are set)."""
    if scaling.attention_factor:
        return scaling.attention_factor

    def derived(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    # DeepSeek's models set both.
    if scaling.mscale and scaling.mscale_all_dim:
        return derived(scaling.mscale) / derived(scaling.mscale_all_dim)
    return derived(1.0)


class _SplitRotate(torch.autograd.Function):
    """Split stacked heads into q, k, v and rotate q and k, in one pass; backward fills one gradient, without a cat."""

    @staticmethod
    def forward(ctx: Any, qkv_BSNE: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Any:
        ctx.save_for_backward(cos, sin)
        turned = heads + kv_heads
        if torch.compiler.is_compiling():  # The compiler fuses plain operators better than it traces in-place ones.
            q, k, v = torch.split(qkv_BSNE, [heads, kv_heads, kv_heads], dim=2)
            # A copy of v, too: what a function gives that the compiler traces is no view of what it got.
            return _plain(q, cos, sin), _plain(k, cos, sin), v.clone(memory_format=torch.contiguous_format)
        qk = rotated(qkv_BSNE[:, :, :turned], cos, sin, torch.empty_like(qkv_BSNE[:, :, :turned]))
        v = qkv_BSNE[:, :, turned:]
        # Attention keeps v: as a view it would keep all of what was projected beside what was rotated.
        return qk[:, :, :heads], qk[:, :, heads:], v if v.device.type == "cpu" else v.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return rotate_heads_gradient(*grads, *ctx.saved_tensors), None, None, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSNE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x_BSNE, cos, sin, torch.empty_like(x_BSNE))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        return rotated(grads[0], cos, -sin, torch.empty_like(grads[0])), None, None


def rotate_heads(
    qkv_BSNE: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split heads stacked as ``heads`` queries, ``kv_heads`` keys, ``kv_heads`` values; rotate queries and keys.

    Args:
        qkv_BSNE: N = heads + 2 kv_heads; may be a strided view.
        cos, sin: (S, 1, E/2) or (B, S, 1, E/2), float32; used in the dtype of `qkv_BSNE`.

    Returns:
        q (B, S, H, E), k (B, S, K, E) and v (B, S, K, E); on a CPU v is a view of `qkv_BSNE`, on a GPU a copy.
    """
    if qkv_BSNE.device.type == "cpu" and torch.compiler.is_compiling():
        q, k, v = torch.split(qkv_BSNE, [heads, kv_heads, kv_heads], dim=2)
        return _plain(q, cos, sin), _plain(k, cos, sin), v
    q, k, v = _SplitRotate.apply(qkv_BSNE, cos, sin, heads, kv_heads)  # type: ignore[no-untyped-call]
    return q, k, v


def rotate(x_BSNE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every head of `x`; shapes as in `rotate_heads`."""
    if torch.compiler.is_compiling():
        return _plain(x_BSNE, cos, sin)
    out: Tensor = _Rotate.apply(x_BSNE, cos, sin)  # type: ignore[no-untyped-call]
    return out


def _plain(x_BSNE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_BSNE.chunk(2, dim=-1)
    cos, sin = cos.to(x_BSNE.dtype), sin.to(x_BSNE.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
