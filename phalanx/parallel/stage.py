"""One pipeline stage on one rank: its layers at work on a micro-batch, and what its backward pass keeps.

Shapes: B samples of the micro-batch, L positions of whole sequences, S those on this rank (context parallel), T = B*S
tokens, D hidden. The residual stream between stages is (T / tensor, D).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.model.decoder import DecoderPart
from phalanx.model.forward_context import Context, DropoutState
from phalanx.parallel.context.context_parallel import Attend, ContextSpread
from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.group import Group
from phalanx.parallel.tensor.tensor_parallel import local_context

# ruff: noqa: N802  (read-only attributes of a protocol, named as the batch names them)


class Samples(Protocol):
    """The batch of a data-parallel rank: as `phalanx.data.batch.Batch`, which this room does not know."""

    @property
    def tokens_BS(self) -> Tensor:
        """(B, L) int64."""
        ...

    @property
    def targets_BS(self) -> Tensor:
        """(B, L) int64."""
        ...

    @property
    def weights_BS(self) -> Tensor:
        """(B, L) float32."""
        ...

    @property
    def documents_BS(self) -> Tensor | None:
        """(B, L) int32, or None."""
        ...

    @property
    def sample_index_B(self) -> Tensor:
        """(B,) int64."""
        ...

    def __len__(self) -> int: ...

    def rows(self, begin: int, end: int) -> Samples:
        """Samples ``begin .. end``."""
        ...

    def filled(self, size: int) -> Samples:
        """These samples, and as many that do not count as are missing to `size`."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """What every stage of this rank needs for one forward pass; the residual stream apart.

    Attributes:
        positions_BS: where the tokens stand in their sequences; None: 0, 1, 2 …
        documents_BS: of this rank's positions, None where attention is replaced or there is one document.
        rows_BS: dropout rows of this rank's tokens; None where nothing is dropped.
        attend_with: attention over split sequences; None for the ordinary one.
    """

    tokens_BS: Tensor
    targets_T: Tensor
    weights_T: Tensor
    positions_BS: Tensor | None
    documents_BS: Tensor | None
    dropout: DropoutState | None
    rows_BS: Tensor | None
    attend_with: Attend | None


def cut_micro_batch(
    samples: Samples, spread: ContextSpread, dropout: DropoutState | None, device: torch.device
) -> MicroBatch:
    """This rank's part of some samples, on its device.

    Args:
        samples: whole sequences.
        dropout: what decides dropped elements in training; None in evaluation.
    """
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
    """A part of the model on this rank.

    Args:
        part: with its seams replaced where matrices are split.
        tensor: the tensor group.

    Attributes:
        loss_sum: weighted cross-entropy summed over the tokens seen since `reset`, nats; of the last stage only.
    """

    def __init__(self, part: DecoderPart, tensor: Group, device: torch.device) -> None:
        self.part, self._tensor = part, tensor
        self._zero = torch.zeros((), device=device)
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
        context = self._context(micro)
        if x_TD is None:
            x_TD = self.part.embed(micro.tokens_BS, context, positions_BS=micro.positions_BS)
        x_TD = self.part.blocks(x_TD, context)
        if self.part.norm is None:
            return x_TD
        loss_sum, z_sum = self.part.sums(self.part.norm(x_TD), micro.targets_T, micro.weights_T)
        self.loss_sum = self.loss_sum + loss_sum.detach()
        return loss_sum + z_sum

    def _context(self, micro: MicroBatch) -> Context:
        context = self.part.context(
            micro.tokens_BS,
            positions_BS=micro.positions_BS,
            documents_BS=micro.documents_BS,
            dropout=micro.dropout,
        )
        rows_T = None if micro.rows_BS is None else micro.rows_BS.flatten()
        context = replace(context, rows_T=rows_T, attend_with=micro.attend_with)
        return local_context(context, self._tensor)


class _Live(NamedTuple):
    """A micro-batch between its forward and its backward pass: the leaf it began with, and where its graph ends.

    The edge holds the graph without the values of the stage's output, which are free once they are sent.
    """

    x: Tensor | None
    output: GradientEdge


class AutogradStage:
    """A `StageRunner` over any differentiable function.

    Args:
        stage: ``stage(x, micro_batch) -> output``: x is None on the first stage, a leaf elsewhere (not to be changed in
            place); the output of the last stage is a scalar, of which gradients are taken.
        queue: where the layers of this stage, and of no other, put off weight gradients; None: they make them at once,
            and a schedule that splits backward passes gains nothing.
    """

    def __init__(self, stage: Callable[[Tensor | None, int], Tensor], queue: WeightQueue | None = None) -> None:
        self._stage = stage
        self._queue = WeightQueue() if queue is None else queue
        self._live: dict[int, _Live] = {}

    @property
    def live(self) -> int:
        """Micro-batches between their forward and their backward pass (of inputs, where it is split)."""
        return len(self._live)

    @property
    def is_splitting(self) -> bool:
        """Whether a backward pass is going on that leaves weight gradients to `backward_weights`."""
        return self._queue.deferring

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor:
        """The stage's output, detached; nothing is kept where gradients are off."""
        if not torch.is_grad_enabled():
            return self._stage(x, micro_batch)
        leaf = None if x is None else x.detach().requires_grad_()
        output = self._stage(leaf, micro_batch)
        assert output.requires_grad, "the output of this stage depends on no parameter and on no input"
        self._live[micro_batch] = _Live(leaf, get_gradient_edge(output))
        return output.detach()

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """All gradients of `micro_batch`; returns that of its input.

        Args:
            gradient: of the output; None on the last stage.
        """
        x, output = self._live.pop(micro_batch)
        torch.autograd.backward((output,), None if gradient is None else (gradient,))
        return None if x is None else x.grad

    def backward_input(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """As `backward`, with the weight gradients that layers can put off left to `backward_weights`."""
        self._queue.begin(micro_batch)
        try:
            return self.backward(micro_batch, gradient)
        finally:
            self._queue.end()

    def backward_weights(self, micro_batch: int) -> None:
        """Make the weight gradients that `backward_input` put off."""
        self._queue.run(micro_batch)
