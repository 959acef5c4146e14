"""The loss head: last projection and cross-entropy in one, without the whole logits.

Logits of T tokens over V words are the largest tensor of a step, and plain autograd holds them three times
(logits, log-probabilities, gradient). Here a chunk of tokens at a time is projected, its loss taken, and its logits
turned in place into the gradient (`phalanx.kernels.cross_entropy`), from which those of the hidden states and of the
weight are made at once. The technique is that of Liger-Kernel's fused linear cross-entropy (arXiv 2410.10989, section
3.2); the weight's gradient is summed in fp32 by the products themselves where a device can.

Rows that pad the vocabulary to a size the GEMM likes are multiplied with the others; their logits are then -inf, so
their probabilities and gradients are exactly zero, as if the rows were not there.

Shapes: T tokens, D hidden, V rows of the vocabulary (padding included), C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.kernels.cross_entropy import LogitTerms, mask_padding, row_losses
from phalanx.kernels.linear import add_product

# Logits of a chunk on a CPU, in elements: with more than its caches hold, memory and time are only lost.
_CHUNK_ELEMENTS = 1 << 21

# On an accelerator every chunk reads and writes the whole gradient of the weight, so chunks are as large as that, in
# elements; and as this at least, by which the reading is spread over enough tokens where the model is narrow.
_LEAST_CHUNK_ELEMENTS = 1 << 28

# Whole logits of at most this many elements cost little memory, and plain autograd has less overhead (docs/kernels.md).
_PLAIN_ELEMENTS = 1 << 17
_PLAIN_ELEMENTS_16_BIT = 1 << 20


def chunk_tokens(tokens: int, vocabulary: int, hidden: int, device: str) -> int:
    """Tokens of a chunk, by what its logits may take; at least 256.

    Args:
        vocabulary: columns of its logits on this rank.
        device: "cpu", or the type of an accelerator.
    """
    elements = _CHUNK_ELEMENTS if device == "cpu" else max(_LEAST_CHUNK_ELEMENTS, vocabulary * hidden)
    return max(1, min(tokens, max(256, elements // vocabulary)))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        cast: Tensor,
        targets: Tensor,
        weights: Tensor,
        terms: LogitTerms,
        chunk: int,
        needs_dx: bool,
        needs_dw: bool,
    ) -> tuple[Tensor, Tensor]:
        loss_sum, z_sum = (x.new_zeros((), dtype=torch.float32) for _ in range(2))
        dx = torch.empty_like(x) if needs_dx else None
        dw: Tensor | None = None
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            w, t = weights[part], targets[part]
            loss, lse, grad = row_losses(x[part] @ cast.t(), t, w, terms, needs_gradient=needs_dx or needs_dw)
            loss_sum += torch.dot(loss, w)
            if lse is not None and terms.z_loss:
                z_sum += torch.dot(lse.square(), w) * terms.z_loss
            if dx is not None and grad is not None:
                torch.mm(grad, cast, out=dx[part])
            if needs_dw and grad is not None:
                dw = add_product(dw, grad.t(), x[part])
        ctx.set_materialize_grads(False)
        ctx.z_loss = terms.z_loss
        if needs_dw and dw is None:
            dw = torch.zeros_like(weight, dtype=torch.float32)
        ctx.save_for_backward(dx, None if dw is None else dw.to(weight.dtype))
        return loss_sum, z_sum

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UserError("the fused loss has no second derivatives", cure="take the loss of plain logits instead")
        if ctx.z_loss and not same_factor(grad_loss, grad_z):
            raise UserError("the loss and the z-loss share one gradient", cure="differentiate their sum")
        if grad_loss is None:
            return (None,) * 9
        return *scaled(ctx, grad_loss), *(None,) * 7


def scaled(ctx: Any, factor: Tensor) -> list[Tensor | None]:
    """The saved gradients, which were made in the forward, times what is known in the backward alone.

    Where memory is a device's they are scaled in place, since that of a head is one of the largest tensors of a step.

    Raises:
        UserError: that was done already, so the graph was kept for a second backward.
    """
    gradients = ctx.saved_tensors
    if factor.device.type == "cpu" or torch.compiler.is_compiling():
        return [None if gradient is None else gradient * factor.to(gradient.dtype) for gradient in gradients]
    if getattr(ctx, "is_spent", False):
        cure = "call backward once, of the sum of what is to be differentiated"
        raise UserError("the fused loss has been differentiated already", cure=cure)
    ctx.is_spent = True
    return [None if gradient is None else gradient.mul_(factor.to(gradient.dtype)) for gradient in gradients]


def same_factor(grad_loss: Tensor | None, grad_z: Tensor | None) -> bool:
    """Whether the two sums entered the objective alike; their values are compared on a CPU, where that is free."""
    if grad_loss is None or grad_z is None:
        return grad_loss is grad_z
    if grad_loss.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    return torch.equal(grad_loss, grad_z)


def plain_linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    weights_T: Tensor,
    softcap: float,
    z_loss: float,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """:func:`linear_cross_entropy` in plain torch, with whole logits: what small cases run, for less overhead."""
    logits = F.linear(x_TD, weight_VD.to(x_TD.dtype)).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    mask_padding(logits, vocabulary)
    loss_sum = torch.dot(F.cross_entropy(logits, targets_T, reduction="none"), weights_T)
    if not z_loss:
        return loss_sum, loss_sum.new_zeros(())
    return loss_sum, z_loss * torch.dot(logits.logsumexp(-1).square(), weights_T)


def linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    weights_T: Tensor | None = None,
    *,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    vocabulary: int | None = None,
    chunk: int | None = None,
    cast_VD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums over tokens of weight times cross-entropy, and of weight times ``z_loss * logsumexp ** 2``.

    The training objective is the sum of the two results over a token count; gradients are made in the forward and are
    those of that sum. The products run in the type of ``x_TD``, everything else in fp32.

    Args:
        x_TD: hidden states.
        weight_VD: output projection; cast to the type of ``x_TD`` once.
        targets_T: int64 word to predict at each token, in [0, vocabulary).
        weights_T: fp32 weight of each token (default 1).
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 for none.
        z_loss: factor of the squared log-sum-exp; 0 for none.
        vocabulary: words; rows of `weight_VD` behind them are padding, with no part in the softmax (default: V).
        chunk: tokens per chunk (default: by vocabulary size).
        cast_VD: the weight in the type of ``x_TD``, where that was made beforehand; gradients are the weight's still.

    Returns:
        (loss_sum, z_sum), fp32 scalars.

    Raises:
        UserError: shapes do not fit, or there are more words than rows; in backward, second derivatives or unequal
            factors of the two sums are asked of the chunked form.
    """
    if x_TD.dim() != 2 or weight_VD.shape[1:] != x_TD.shape[1:] or targets_T.shape != x_TD.shape[:1]:
        raise UserError(
            f"hidden states {tuple(x_TD.shape)}, weight {tuple(weight_VD.shape)} and targets {tuple(targets_T.shape)} "
            "do not fit",
            cure="pass (tokens, hidden), (vocabulary, hidden) and (tokens,)",
        )
    rows = weight_VD.shape[0]
    words = rows if vocabulary is None else vocabulary
    if not 0 < words <= rows:
        raise UserError(
            "does not fit the rows of the weight", cure=f"take 1 to {rows}", field="vocabulary", value=vocabulary
        )
    if weights_T is None:
        weights_T = x_TD.new_ones(x_TD.shape[0], dtype=torch.float32)
    plain_elements = _PLAIN_ELEMENTS if x_TD.element_size() > 2 else _PLAIN_ELEMENTS_16_BIT
    if chunk is None and x_TD.shape[0] * rows <= plain_elements:
        return plain_linear_cross_entropy(x_TD, weight_VD, targets_T, weights_T.float(), softcap, z_loss, words)
    needs_dx, needs_dw = (torch.is_grad_enabled() and t.requires_grad for t in (x_TD, weight_VD))
    size = chunk or chunk_tokens(x_TD.shape[0], rows, x_TD.shape[1], x_TD.device.type)
    terms = LogitTerms(words, softcap, z_loss)
    if cast_VD is None:
        cast_VD = weight_VD.detach().to(x_TD.dtype)
    out: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_TD, weight_VD, cast_VD, targets_T, weights_T.float(), terms, size, needs_dx, needs_dw
    )
    return out
