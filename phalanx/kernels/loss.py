"""The loss head: last projection and cross-entropy in one, without the whole logits.

Logits of T tokens over V words are the largest tensor of a step, and plain autograd holds them three times
(logits, log-probabilities, gradient). Here a chunk of tokens at a time is projected, its loss taken, and its logits
turned in place into the gradient, from which those of the hidden states and of the weight are made at once. The
technique is that of Liger-Kernel's fused linear cross-entropy (arXiv 2410.10989, section 3.2).

Shapes: T tokens, D hidden, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.core.errors import UserError

# Logits of a chunk, in elements: beyond the size at which one chunk's GEMM is efficient, memory is only lost.
_CHUNK_ELEMENTS = 1 << 21


def _chunk_size(tokens: int, vocabulary: int, chunk: int | None) -> int:
    if chunk is not None:
        return chunk
    return max(1, min(tokens, max(256, _CHUNK_ELEMENTS // vocabulary)))


def _chunk_loss(logits: Tensor, targets: Tensor, softcap: float) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Loss and log-sum-exp of a chunk, its fp32 logits (capped) and the derivative of the cap."""
    slope = None
    logits = logits.float()
    if softcap:
        tanh = logits.div_(softcap).tanh_()
        slope = torch.addcmul(torch.ones((), device=logits.device), tanh, tanh, value=-1.0)
        logits = tanh * softcap
    lse = logits.logsumexp(dim=-1)
    return lse - logits.gather(1, targets[:, None]).squeeze(1), lse, logits, slope


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor,
        softcap: float,
        z_loss: float,
        chunk: int,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        loss_sum = x.new_zeros((), dtype=torch.float32)
        z_sum = x.new_zeros((), dtype=torch.float32)
        cast = weight.to(x.dtype)
        dx = torch.empty_like(x) if needs_grad else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            w, t = weights[part], targets[part]
            loss, lse, logits, slope = _chunk_loss(x[part] @ cast.t(), t, softcap)
            loss_sum += (loss * w).sum()
            z_sum += (lse * lse * w).sum() * z_loss
            if dx is None or dw is None:
                continue
            grad = logits.sub_(lse[:, None]).exp_()
            if z_loss:
                grad.mul_((1.0 + 2.0 * z_loss * lse)[:, None])
            grad.scatter_add_(1, t[:, None], torch.full_like(lse, -1.0)[:, None])
            grad.mul_(w[:, None])
            if slope is not None:
                grad.mul_(slope)
            grad = grad.to(x.dtype)
            dx[part] = grad @ cast
            dw += grad.t() @ x[part]
        ctx.set_materialize_grads(False)
        ctx.z_loss = z_loss
        ctx.weight_dtype = weight.dtype
        if dx is not None and dw is not None:
            ctx.save_for_backward(dx, dw)
        return loss_sum, z_sum

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        if grad_loss is None or (ctx.z_loss and grad_z is None):
            raise UserError("the loss and the z-loss share one gradient", cure="differentiate their sum")
        return dx * grad_loss.to(dx.dtype), (dw * grad_loss).to(ctx.weight_dtype), *(None,) * 6


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    weights_T: Tensor | None = None,
    *,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums over tokens of weight times cross-entropy, and of weight times ``z_loss * logsumexp ** 2``.

    The training objective is the sum of the two results over a token count; gradients are made in the forward and are
    those of that sum. The products run in the type of ``x_TD``, everything else in fp32.

    Args:
        x_TD: hidden states.
        weight_VD: output projection; cast to the type of ``x_TD`` once.
        targets_T: int64 word to predict at each token, in [0, V).
        weights_T: fp32 weight of each token (default 1).
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 for none.
        z_loss: factor of the squared log-sum-exp; 0 for none.
        chunk: tokens per chunk (default: by vocabulary size).

    Returns:
        (loss_sum, z_sum), fp32 scalars.

    Raises:
        UserError: shapes do not fit.
    """
    if x_TD.dim() != 2 or weight_VD.shape[1:] != x_TD.shape[1:] or targets_T.shape != x_TD.shape[:1]:
        raise UserError(
            f"hidden states {tuple(x_TD.shape)}, weight {tuple(weight_VD.shape)} and targets {tuple(targets_T.shape)} "
            "do not fit",
            cure="pass (tokens, hidden), (vocabulary, hidden) and (tokens,)",
        )
    if weights_T is None:
        weights_T = x_TD.new_ones(x_TD.shape[0], dtype=torch.float32)
    needs_grad = torch.is_grad_enabled() and (x_TD.requires_grad or weight_VD.requires_grad)
    size = _chunk_size(x_TD.shape[0], weight_VD.shape[0], chunk)
    out: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_TD, weight_VD, targets_T, weights_T.float(), softcap, z_loss, size, needs_grad
    )
    return out
