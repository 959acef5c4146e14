"""Embedding and loss over a vocabulary that is split among ranks; no rank ever holds a token's whole row of logits.

*Embedding*: each rank looks up the tokens whose rows it has, zeros for the others, and a reduce-scatter leaves every
rank its rows of the stream.

*Loss*: as in `phalanx.kernels.loss`, and by the same kernels, a chunk of tokens at a
time is projected and its logits are turned in place into their gradient; but a chunk's tokens are gathered first, each
rank has the logits of its words alone, and the only things exchanged about them are two numbers per token and rank: the
log-sum-exp over the rank's words, and the target's logit where the rank has it. All ranks get the same loss, to the
bit. The gathers of the next chunks, and the reduce-scatters of the chunks' gradients, run beside the products.

Shapes: T tokens, n ranks, R = T / n rows of this rank, C tokens of a chunk, D hidden, V rows of the whole vocabulary
(padding included), W = V / n of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.kernels.linear import add_product, linear, project
from phalanx.kernels.loss import LogitTerms, chunk_tokens, head_gradients, mask_padding, row_gradient, row_statistics
from phalanx.parallel.group import Group, Work
from phalanx.parallel.tensor.overlap import gather_rows, scatter_rows


def embed_rows(group: Group, weight_WD: Tensor, tokens_T: Tensor) -> Tensor:
    """This rank's rows (R, D) of the embeddings of all tokens."""
    out: Tensor = _Embed.apply(group, weight_WD, tokens_T)  # type: ignore[no-untyped-call]
    return out


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, weight: Tensor, tokens_T: Tensor) -> Tensor:
        row_T, elsewhere_T = _local_rows(group, len(weight), tokens_T)
        ctx.group, ctx.rows = group, len(weight)
        ctx.save_for_backward(row_T, elsewhere_T)
        x_TD = F.embedding(row_T, weight)
        return scatter_rows(group, x_TD.masked_fill_(elsewhere_T[:, None], 0.0))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[None, Tensor, None]:
        row_T, elsewhere_T = ctx.saved_tensors
        grad_TD = gather_rows(ctx.group, grad_RD).masked_fill(elsewhere_T[:, None], 0.0)
        return None, torch.ops.aten.embedding_dense_backward(grad_TD, row_T, ctx.rows, -1, False), None


def _local_rows(group: Group, rows: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """Local row of each word (0 where another rank has it), and which ones another rank has."""
    local = words - group.index * rows
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill(elsewhere, 0), elsewhere


def split_cross_entropy(
    group: Group, hidden_RD: Tensor, weight_WD: Tensor, targets_T: Tensor, weights_T: Tensor | None, terms: LogitTerms
) -> tuple[Tensor, Tensor]:
    """Sums over all T tokens of weighted loss and weighted z-loss, the same on every rank.

    Hidden rows and head are this rank's, targets and weights (default 1) those of all tokens, and `terms` of the whole
    vocabulary. Gradients are made in the forward, and are those of the sum of the two, once for the whole group: that
    of the hidden rows is complete, that of the weight is over all tokens.

    Raises:
        UserError: the shapes do not fit; in backward, second derivatives or unequal factors of the sums are asked for.
    """
    tokens = group.size * hidden_RD.shape[0]
    if targets_T.shape != (tokens,):
        cure = f"pass the targets of all {tokens} tokens of the {group.size} ranks"
        raise UserError(f"targets {tuple(targets_T.shape)} do not fit hidden rows {tuple(hidden_RD.shape)}", cure=cure)
    if weights_T is None:
        weights_T = hidden_RD.new_ones(tokens, dtype=torch.float32)
    needs = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden_RD, weight_WD))
    out: tuple[Tensor, Tensor] = _SplitCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_RD, weight_WD, targets_T, weights_T.float(), group, terms, needs
    )
    return out


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor,
        group: Group,
        terms: LogitTerms,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor]:
        head = _Head(group, weight.to(hidden.dtype), terms, needs)
        sums, dx, dw = head.run(hidden.contiguous(), targets.view(group.size, -1), weights.view(group.size, -1))
        ctx.set_materialize_grads(False)
        ctx.z_loss = terms.z_loss
        ctx.save_for_backward(dx, None if dw is None else dw.to(weight.dtype))
        return sums[0], sums[1]

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
        return head_gradients(ctx, grad_loss, grad_z, "split", 7)


@dataclass(frozen=True)
class _Head:
    """One pass of the loss over chunks; a chunk is the same few rows of every rank, (n, c)."""

    group: Group
    weight_WD: Tensor
    terms: LogitTerms
    needs: tuple[bool, bool]

    def run(
        self, hidden_RD: Tensor, targets_nR: Tensor, weights_nR: Tensor
    ) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """Loss and z-loss, and the gradients that are needed: of the hidden rows, and of the weight in fp32."""
        size, (words, width), count = self.group.size, self.weight_WD.shape, hidden_RD.shape[0]
        step = max(1, chunk_tokens(count * size, words, width, self.weight_WD.device.type) // size)
        chunks = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        sums = [hidden_RD.new_zeros((), dtype=torch.float32) for _ in range(2)]
        dx_RD = torch.empty_like(hidden_RD, dtype=torch.float32) if self.needs[0] else None
        dw_WD: Tensor | None = None
        scatters: list[tuple[Work, Tensor]] = []
        coming = self._gather(hidden_RD, chunks[0])
        for rows, following in zip(chunks, [*chunks[1:], None], strict=True):
            work, x_CD = coming
            if following is not None:
                coming = self._gather(hidden_RD, following)
            work.wait()
            grad_CW = self._chunk(x_CD, targets_nR[:, rows].flatten(), weights_nR[:, rows].flatten(), sums)
            if dx_RD is not None:
                dx_CD = project(grad_CW, self.weight_WD)
                scatters.append((self.group.reduce_scatter(dx_RD[rows], dx_CD), dx_CD))
            if self.needs[1]:
                dw_WD = add_product(dw_WD, grad_CW.t(), x_CD)
        for work, _ in scatters:
            work.wait()
        return sums, None if dx_RD is None else dx_RD.to(hidden_RD.dtype), dw_WD

    def _gather(self, hidden_RD: Tensor, rows: slice) -> tuple[Work, Tensor]:
        mine = hidden_RD[rows]
        out = mine.new_empty(self.group.size * mine.shape[0], mine.shape[1])
        return self.group.all_gather(out, mine), out

    def _chunk(self, x_CD: Tensor, targets_C: Tensor, weights_C: Tensor, sums: list[Tensor]) -> Tensor:
        """Adds a chunk's loss and z-loss to `sums`; the gradient by its logits (C, W), in the compute type."""
        terms, group = self.terms, self.group
        own = replace(terms, words=_own_words(group, len(self.weight_WD), terms.words))
        row_C, elsewhere_C = _local_rows(group, len(self.weight_WD), targets_C)
        row_C = row_C.masked_fill_(elsewhere_C, -1)
        seen = row_statistics(linear(x_CD, self.weight_WD), row_C, own)
        all_ranks = gather_rows(group, torch.stack((seen.lse_C, seen.target_C))[None])
        lse_C, target_C = all_ranks[:, 0].logsumexp(0), all_ranks[:, 1].sum(0)
        sums[0] += torch.dot(lse_C - target_C, weights_C)
        if terms.z_loss:
            sums[1] += terms.z_loss * torch.dot(lse_C.square(), weights_C)
        return row_gradient(seen, lse_C, row_C, weights_C, own)


def _own_words(group: Group, rows: int, vocabulary: int) -> int:
    return min(max(vocabulary - group.index * rows, 0), rows)


def full_logits(group: Group, hidden_R: Tensor, weight_WD: Tensor, terms: LogitTerms) -> Tensor:
    """Float32 logits (T, V) of all tokens on every rank, for evaluation; hidden rows (R, D) in the compute type."""
    logits_TW = linear(gather_rows(group, hidden_R), weight_WD.to(hidden_R.dtype)).float()
    if terms.softcap:
        logits_TW = terms.softcap * torch.tanh(logits_TW / terms.softcap)
    logits_TW = mask_padding(logits_TW, _own_words(group, logits_TW.shape[-1], terms.words))
    return gather_rows(group, logits_TW.t()).t()
