"""Cross-entropy of a chunk of logits, and its gradient in the logits' own memory.

One interface, two ways: plain torch, which is the reference and what a CPU runs, and on a GPU with Triton the twin in
`phalanx.kernels.cross_entropy_triton`, which reads 16-bit logits once from memory and writes their gradient over them,
where the reference makes fp32 copies. Both heads use it: `phalanx.kernels.loss`, which has whole rows, and
`phalanx.parallel.tensor.vocabulary_parallel`, where a rank has some columns of every row and the sums of the others
come from the group between the two passes.

Shapes: C tokens of a chunk, V columns (words of this rank, padding included).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LogitTerms:
    """What is made of logits.

    Attributes:
        words: columns that are words; those behind them are padding, with no part in the softmax.
        softcap: logits become ``softcap * tanh(logits / softcap)``; 0 for none.
        z_loss: factor of the squared log-sum-exp; 0 for none.
    """

    words: int
    softcap: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class RowStatistics:
    """Of the columns that are here.

    Attributes:
        lse_C: fp32 log-sum-exp of every row.
        target_C: fp32 logit of the row's target; 0 where its column is elsewhere.
    """

    lse_C: Tensor
    target_C: Tensor
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
    """The logits (..., V) with -inf written behind the first `words`; without padding nothing is done."""
    if words < logits.shape[-1]:
        logits[..., words:] = -torch.inf
    return logits


def row_losses(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, terms: LogitTerms, *, needs_gradient: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss, log-sum-exp and gradient of whole rows; the logits are used up.

    Args:
        logits_CV: in the compute type.
        targets_C: int64, in [0, words).
        weights_C: fp32 weight of each row.

    Returns:
        (loss_C, lse_C, grad_CV): fp32 losses without weights; fp32 log-sum-exp, at least where there is a z-loss; and
        the gradient of the weighted loss and z-loss by the logits, in their type, where it is needed.
    """
    if (kernels := twin(logits_CV)) is not None:
        loss_C, lse_C = kernels.row_losses_(logits_CV, targets_C, weights_C, terms, needs_gradient=needs_gradient)
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

    Args:
        targets_C: int64 column of the target, -1 where it is not here.
    """
    if (kernels := twin(logits_CV)) is not None:
        lse_C, target_C = kernels.row_statistics(logits_CV, targets_C, terms)
        return RowStatistics(lse_C, target_C, logits_CV.dtype, logits_CV)
    logits, slope = _capped(logits_CV.float(), terms.softcap)
    mask_padding(logits, terms.words)
    target_C = logits.gather(1, targets_C.clamp(min=0)[:, None]).squeeze(1).masked_fill_(targets_C < 0, 0.0)
    return RowStatistics(logits.logsumexp(1), target_C, logits_CV.dtype, logits, slope)


def row_gradient(
    statistics: RowStatistics, lse_C: Tensor, targets_C: Tensor, weights_C: Tensor, terms: LogitTerms
) -> Tensor:
    """Gradient (C, V) of the weighted loss and z-loss by the logits that are here, in their type.

    Args:
        lse_C: log-sum-exp over the columns of all ranks.
        targets_C: as in :func:`row_statistics`.
    """
    logits_CV = statistics._logits_CV
    if (kernels := twin(logits_CV)) is not None:
        kernels.row_gradient_(logits_CV, lse_C, targets_C, weights_C, terms)
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
