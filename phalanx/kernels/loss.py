"""The loss head: last projection and cross-entropy in one, without the whole logits.

Logits of T tokens over V words are the largest tensor of a step, and plain autograd holds them three times
(logits, log-probabilities, gradient). Here a chunk of tokens at a time is projected, its loss taken, and its logits
turned in place into the gradient, from which those of the hidden states and of the
weight are made at once. The technique is that of Liger-Kernel's fused linear cross-entropy (arXiv 2410.10989, section
3.2); the weight's gradient is summed in fp32 by the products themselves where a device can.

Rows that pad the vocabulary to a size the GEMM likes are multiplied with the others; their logits are then -inf, so
their probabilities and gradients are exactly zero, as if the rows were not there.

The cross-entropy of a chunk has one interface and two ways: plain torch, which is the reference and what a CPU runs,
and on a GPU with Triton the twin in `phalanx.kernels.cross_entropy_triton`, which reads 16-bit logits once from memory
and writes their gradient over them, where the reference makes fp32 copies. The head of
`phalanx.parallel.tensor.vocabulary_parallel` uses it too: there a rank has some columns of every row, and the sums of
the others come from the group between the two passes.

Shapes: T tokens, D hidden, V rows of the vocabulary (of this rank, padding included), C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.kernels.linear import add_product

# Logits of a chunk on a CPU, in elements: with more than its caches hold, memory and time are only lost.
_CHUNK_ELEMENTS = 1 << 21

# On an accelerator every chunk reads and writes the whole gradient of the weight, so chunks are as large as that, in
# elements; and as this at least, by which the reading is spread over enough tokens where the model is narrow.
_LEAST_CHUNK_ELEMENTS = 1 << 28

# Whole logits of at most this many elements cost little memory, and plain autograd has less overhead (docs/kernels.md).
_PLAIN_ELEMENTS = 1 << 17
_PLAIN_ELEMENTS_16_BIT = 1 << 20


@dataclass(frozen=True)
class LogitTerms:
    """What is made of logits."""

    words: int  # columns that are words; those behind them are padding, with no part in the softmax
    softcap: float = 0.0  # logits become ``softcap * tanh(logits / softcap)``; 0 for none
    z_loss: float = 0.0  # factor of the squared log-sum-exp; 0 for none


@dataclass(frozen=True)
class RowStatistics:
    """Of the columns that are here."""

    lse_C: Tensor  # fp32 log-sum-exp of every row
    target_C: Tensor  # fp32 logit of the row's target; 0 where its column is elsewhere
    _dtype: torch.dtype
    _logits_CV: Tensor
    _slope_CV: Tensor | None = None


def twin(like: Tensor) -> ModuleType | None:
    """The Triton kernels, where tensors like this one are on a GPU and Triton is there."""
    if like.device.type != "cuda":
        return None
    try:
        from phalanx.kernels import cross_entropy_triton
    except ImportError:
        return None
    return cross_entropy_triton


def mask_padding(logits: Tensor, words: int) -> Tensor:
    """Write -inf into the logits (..., V) behind the first `words`; without padding nothing is done."""
    if words < logits.shape[-1]:
        logits[..., words:] = -torch.inf
    return logits


def row_losses(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, terms: LogitTerms, *, needs_gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss, log-sum-exp and gradient of whole rows, of logits in the compute type, which are used up.

    Returns:
        fp32 losses without weights; fp32 log-sum-exp, at least where there is a z-loss; and the gradient (C, V) of the
        weighted loss and z-loss by the logits, in their type, where it is needed.
    """
    if (kernels := twin(logits_CV)) is not None:
        loss_C, lse_C = kernels.row_losses_(
            logits_CV, targets_C, weights_C, terms.words, terms.softcap, terms.z_loss, needs_gradient
        )
        return loss_C, lse_C, logits_CV if needs_gradient else None
    dtype = logits_CV.dtype
    logits, slope = _capped(logits_CV.float(), terms.softcap)
    log_p = torch.log_softmax(mask_padding(logits, terms.words), dim=-1)
    loss_C = F.nll_loss(log_p, targets_C, reduction="none")
    lse_C = logits.gather(1, targets_C[:, None]).squeeze(1) + loss_C if terms.z_loss else None
    if not needs_gradient:
        return loss_C, lse_C, None
    grad = log_p.exp_()
    if lse_C is not None:
        grad.mul_(torch.add(1.0, lse_C, alpha=2.0 * terms.z_loss)[:, None])
    grad.scatter_add_(1, targets_C[:, None], grad.new_full((1, 1), -1.0).expand(len(targets_C), 1))
    if slope is not None:
        grad.mul_(slope)
    return loss_C, lse_C, grad.mul_(weights_C[:, None]).to(dtype)


def row_statistics(logits_CV: Tensor, targets_C: Tensor, terms: LogitTerms) -> RowStatistics:
    """What the group has to know of the columns that are here; the logits are used up by :func:`row_gradient`.

    A target is -1 where its column is elsewhere.
    """
    if (kernels := twin(logits_CV)) is not None:
        lse_C, target_C = kernels.row_statistics(logits_CV, targets_C, terms.words, terms.softcap)
        return RowStatistics(lse_C, target_C, logits_CV.dtype, logits_CV)
    logits, slope = _capped(logits_CV.float(), terms.softcap)
    mask_padding(logits, terms.words)
    target_C = logits.gather(1, targets_C.clamp(min=0)[:, None]).squeeze(1).masked_fill_(targets_C < 0, 0.0)
    return RowStatistics(logits.logsumexp(1), target_C, logits_CV.dtype, logits, slope)


def row_gradient(
    statistics: RowStatistics, lse_C: Tensor, targets_C: Tensor, weights_C: Tensor, terms: LogitTerms
) -> Tensor:
    """Gradient (C, V) of weighted loss and z-loss by the logits here, in their type; `lse_C` is over all ranks."""
    logits_CV = statistics._logits_CV
    if (kernels := twin(logits_CV)) is not None:
        kernels.row_gradient_(logits_CV, lse_C, targets_C, weights_C, terms.words, terms.softcap, terms.z_loss)
        return logits_CV
    factor_C = weights_C * torch.add(1.0, lse_C, alpha=2.0 * terms.z_loss) if terms.z_loss else weights_C
    grad = logits_CV.sub_(lse_C[:, None]).exp_().mul_(factor_C[:, None])
    hit_C = (-weights_C).masked_fill_(targets_C < 0, 0.0)
    grad.scatter_add_(1, targets_C.clamp(min=0)[:, None], hit_C[:, None])
    return (grad if statistics._slope_CV is None else grad.mul_(statistics._slope_CV)).to(statistics._dtype)


def _capped(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """fp32 logits after the soft cap, which overwrites them, and the cap's derivative."""
    if not softcap:
        return logits, None
    tanh = logits.div_(softcap).tanh_()
    return tanh * softcap, tanh.square().neg_().add_(1.0)


def chunk_tokens(tokens: int, vocabulary: int, hidden: int, device: str) -> int:
    """Tokens of a chunk, by what its logits may take; at least 256. `device`: "cpu", or an accelerator's type."""
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
            # The gradient is written over the chunk's logits; with it, those of `x` and of the weight are made at once.
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
        return head_gradients(ctx, grad_loss, grad_z, "fused", 9)


def head_gradients(
    ctx: Any, grad_loss: Tensor | None, grad_z: Tensor | None, which: str, inputs: int
) -> tuple[Tensor | None, ...]:
    """The saved gradients of a loss head, which were made in the forward, times what is known in the backward alone.

    Raises:
        UserError: second derivatives or a second backward are asked for, or unequal factors of the two sums.
    """
    if torch.is_grad_enabled():
        raise UserError(f"the {which} loss has no second derivatives", cure="take the loss of plain logits instead")
    # The forward made one gradient, of the sum of both results; it holds only where they enter the objective alike.
    # Values are compared only on a CPU, where that is free.
    if ctx.z_loss:
        alike = grad_loss is grad_z
        if grad_loss is not None and grad_z is not None:
            is_free = grad_loss.device.type == "cpu" and not torch.compiler.is_compiling()
            alike = not is_free or torch.equal(grad_loss, grad_z)
        if not alike:
            raise UserError("the loss and the z-loss share one gradient", cure="differentiate their sum")
    if grad_loss is None:
        return (None,) * inputs
    if grad_loss.device.type == "cpu" or torch.compiler.is_compiling():
        made = [None if x is None else x * grad_loss.to(x.dtype) for x in ctx.saved_tensors]
    else:
        # On a device they are scaled in place: the gradient of a head is one of the largest tensors of a step.
        if getattr(ctx, "is_spent", False):
            cure = "call backward once, of the sum of what is to be differentiated"
            raise UserError("the fused loss has been differentiated already", cure=cure)
        ctx.is_spent = True
        made = ctx.saved_tensors
        for x in made:
            if x is not None:
                torch._foreach_mul_([x], grad_loss.to(x.dtype))  # `mul_` by such a tensor is half as fast
    return *made, *(None,) * (inputs - len(made))


def plain_linear_cross_entropy(
    x_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    weights_T: Tensor,
    softcap: float,
    z_loss: float,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """As `linear_cross_entropy`, in plain torch with whole logits: less overhead for small cases."""
    logits = F.linear(x_TD, weight_VD.to(x_TD.dtype)).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    mask_padding(logits, vocabulary)
    loss_sum = torch.dot(F.cross_entropy(logits, targets_T, reduction="none"), weights_T)
    if not z_loss:
        return loss_sum, loss_sum.new_zeros(())
    return loss_sum, z_loss * torch.dot(logits.logsumexp(-1).square(), weights_T)


def linear_cross_entropy(
    x_TD: Tensor,  # hidden states
    weight_VD: Tensor,  # output projection; cast to the type of ``x_TD`` once
    targets_T: Tensor,  # int64 word to predict at each token, in [0, vocabulary)
    weights_T: Tensor | None = None,  # fp32 weight of each token (default 1)
    *,
    softcap: float = 0.0,  # logits become ``softcap * tanh(logits / softcap)``; 0 for none
    z_loss: float = 0.0,  # factor of the squared log-sum-exp; 0 for none
    # words; rows of `weight_VD` behind them are padding, with no part in the softmax (default: V)
    vocabulary: int | None = None,
    chunk: int | None = None,  # tokens per chunk (default: by vocabulary size)
    # the weight in the type of ``x_TD``, where that was made beforehand; gradients are the weight's still
    cast_VD: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums over tokens of weight times cross-entropy, and of weight times ``z_loss * logsumexp ** 2``; fp32 scalars.

    The training objective is the sum of the two results over a token count; gradients are made in the forward and are
    those of that sum. The products run in the type of ``x_TD``, everything else in fp32.

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
