"""One pipeline stage on one rank: its layers at work on a micro-batch.

Shapes: B samples of the micro-batch, L positions of whole sequences, S those on this rank (context parallel), T = B*S
tokens, D hidden. The residual stream between stages is (T / tensor, D).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from phalanx.model.decoder import DecoderPart
from phalanx.model.forward_context import Context, DropoutState
from phalanx.parallel.context.context_parallel import Attend, ContextSpread
from phalanx.parallel.group import Group
from phalanx.parallel.tensor.parallel_linear import local_rows

# ruff: noqa: N802  (read-only attributes of a protocol, named as the batch names them)


class Samples(Protocol):
    """The batch of a data-parallel rank: as `phalanx.data.batch.Batch`, which this room does not know."""

    # Read-only, for batches are frozen.
    @property
    def tokens_BS(self) -> Tensor:
        """(B, L) int64."""

    @property
    def targets_BS(self) -> Tensor:
        """(B, L) int64."""

    @property
    def weights_BS(self) -> Tensor:
        """(B, L) float32."""

    @property
    def documents_BS(self) -> Tensor | None:
        """(B, L) int32, or None."""

    @property
    def sample_index_B(self) -> Tensor:
        """(B,) int64."""

    def __len__(self) -> int: ...

    def rows(self, begin: int, end: int) -> Samples:
        """Samples ``begin .. end``."""

    def filled(self, size: int) -> Samples:
        """These samples, and as many that do not count as are missing to `size`."""


@dataclass(frozen=True)
class MicroBatch:
    """What every stage of this rank needs for one forward pass; the residual stream apart."""

    tokens_BS: Tensor
    targets_T: Tensor
    weights_T: Tensor
    positions_BS: Tensor | None  # where the tokens stand in their sequences; None: 0, 1, 2 …
    documents_BS: Tensor | None  # of this rank's positions, None where attention is replaced or there is one document
    dropout: DropoutState | None
    rows_BS: Tensor | None  # dropout rows of this rank's tokens; None where nothing is dropped
    attend_with: Attend | None  # attention over split sequences; None for the ordinary one


def cut_micro_batch(
    samples: Samples, spread: ContextSpread, dropout: DropoutState | None, device: torch.device
) -> MicroBatch:
    """This rank's part of some samples of whole sequences, on its device; `dropout` is None in evaluation."""
    split = spread.group.size > 1
    tokens = spread.cut(samples.tokens_BS).to(device, non_blocking=True)
    documents = None if samples.documents_BS is None else samples.documents_BS.to(device, non_blocking=True)
    positions = spread.positions_on(device).expand(len(tokens), -1) if split else None
    return MicroBatch(
        tokens_BS=tokens,
        targets_T=spread.cut(samples.targets_BS).flatten().to(device, non_blocking=True),
        weights_T=spread.cut(samples.weights_BS).flatten().to(device, non_blocking=True),
        positions_BS=positions,
        documents_BS=None if split else documents,
        dropout=dropout,
        rows_BS=None if dropout is None else spread.dropout_rows(dropout).to(device, non_blocking=True),
        attend_with=spread.attend_with(documents, dropout),
    )


class Stage:
    """A part of the model on this rank, with its seams replaced where matrices are split."""

    def __init__(self, part: DecoderPart, tensor: Group, device: torch.device) -> None:
        self.part, self._tensor = part, tensor
        self._zero = torch.zeros((), device=device)
        # Weighted cross-entropy summed over the tokens seen since `reset`, nats; of the last stage only.
        self.loss_sum = self._zero

    @property
    def is_last(self) -> bool:
        """Whether the loss is made here."""
        return self.part.head is not None

    def reset(self) -> None:
        """Forget the loss seen so far."""
        self.loss_sum = self._zero

    def forward(self, x_TD: Tensor | None, micro: MicroBatch) -> Tensor:
        """The stream after this part, (T / tensor, D); of the last part, the objective summed over tokens."""
        context = self.part.context(
            micro.tokens_BS, positions_BS=micro.positions_BS, documents_BS=micro.documents_BS, dropout=micro.dropout
        )
        rows_T = None if micro.rows_BS is None else micro.rows_BS.flatten()
        context = local_context(replace(context, rows_T=rows_T, attend_with=micro.attend_with), self._tensor)
        if x_TD is None:
            x_TD = self.part.embed(micro.tokens_BS, context, positions_BS=micro.positions_BS)
        x_TD = self.part.blocks(x_TD, context)
        if self.part.norm is None:
            return x_TD
        loss_sum, z_sum = self.part.sums(self.part.norm(x_TD), micro.targets_T, micro.weights_T)
        self.loss_sum = self.loss_sum + loss_sum.detach()
        return loss_sum + z_sum


def local_context(context: Context, group: Group) -> Context:
    """A part's context on one rank of `group`: rows of the stream are cut, queries are not.

    Raises:
        UserError: the ranks cannot have equally many rows.
    """
    rows = local_rows(context.batch * context.length, group)
    if group.size == 1 or context.rows_T is None:
        return context
    queries = context.attention_rows_BS
    if queries is None:
        queries = context.rows_T.view(context.batch, context.length)
    return replace(context, rows_T=context.rows_T[rows], attention_rows_BS=queries)
