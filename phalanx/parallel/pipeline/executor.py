"""Runs one rank's part of a pipeline table.

Sends and receives are apart from each other and asynchronous (MegaScale, arXiv 2402.15627, section 3.2): receives are
started ahead of their turn, sends are started and left alone. A rank waits only for the very message that its next
action needs, so a late peer does not hold up what does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from phalanx.parallel.group import Groups, Work
from phalanx.parallel.pipeline.channels import Channels
from phalanx.parallel.pipeline.routes import Message, Step, route
from phalanx.parallel.pipeline.tables import Action, Placement, Table


class StageRunner(Protocol):
    """What the executor asks of one stage. Activations and gradients are (T, D) of this rank."""

    def forward(self, micro_batch: int, x: Tensor | None) -> Tensor | None:
        """The stage's output of `x`; x is None on the first stage. What the last stage returns is the run's result."""
        ...

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """All gradients; returns that of the stage's input, None on the first stage. `gradient` is None on the last."""
        ...

    def backward_input(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """As `backward`, but weight gradients may be left to `backward_weights`."""
        ...

    def backward_weights(self, micro_batch: int) -> None:
        """What `backward_input` of `micro_batch` left."""
        ...


class PipelineExecutor:
    """The stages of one rank, and the channels to its neighbours, opened once for all steps.

    Args:
        groups: of this rank. All ranks along the pipeline axis make their executor at the same time.
        placement: of the stages over pipeline ranks; every table that is run has an equal one.
        runners: of this rank's stages, by stage.
        dtype: of activations and their gradients: the model's residual dtype.
        device: where they are.
        look_ahead: receives started before their turn. More hide longer delays and hold more activations.

    Raises:
        PipelineError: a neighbour did not come.
    """

    def __init__(
        self,
        groups: Groups,
        placement: Placement,
        runners: Mapping[int, StageRunner],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        look_ahead: int = 2,
    ) -> None:
        self._device, self._dtype, self._look_ahead = torch.device(device), dtype, look_ahead
        self._channels = Channels(groups, placement, self._device)
        self._placement, self._runners = placement, runners
        assert sorted(runners) == placement.stages_of(self.rank), f"rank {self.rank} has other stages"
        self._steps: dict[Table, list[Step]] = {}

    @property
    def rank(self) -> int:
        """Place on the pipeline axis."""
        return self._channels.rank

    def run(self, table: Table, shapes: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """Run this rank's actions, and wait until all that was sent is gone.

        Args:
            table: the same on all ranks of the pipeline.
            shapes: of the activations between stages on this rank, one per micro-batch.

        Returns:
            What the last stage's forward passes returned, by micro-batch; empty on ranks that do not have it.

        Raises:
            PipelineError: a peer is gone or too late; names stage, micro-batch and peer.
        """
        assert table.placement == self._placement, "the table places stages elsewhere"
        assert len(shapes) == table.micro_batches, "one shape per micro-batch"
        mail = _Mail(self._channels, shapes, self._dtype, self._device)
        results: dict[int, Tensor] = {}
        for step in self._route(table):
            result = self._perform(step, mail)
            if result is not None and step.action.kind == "F":
                results[step.action.micro_batch] = result
        mail.finish()
        return results

    def _route(self, table: Table) -> list[Step]:
        if table not in self._steps:
            self._steps[table] = route(table, self.rank, self._look_ahead)
        return self._steps[table]

    def _perform(self, step: Step, mail: _Mail) -> Tensor | None:
        """One action with the communication around it; what it made, if no other stage needs it."""
        mail.expect(step.post)
        x = None if step.need is None else mail.take(step.need)
        mail.release(step.confirmed)
        made = self._compute(step.action, x)
        if step.give is None:
            return made
        assert made is not None, f"{step.action} made nothing for stage {step.give.stage}"
        mail.give(step.give, made)
        return None

    def _compute(self, action: Action, x: Tensor | None) -> Tensor | None:
        runner, micro_batch = self._runners[action.stage], action.micro_batch
        try:
            if action.kind == "F":
                return runner.forward(micro_batch, x)
            if action.kind == "B":
                return runner.backward(micro_batch, x)
            if action.kind == "I":
                return runner.backward_input(micro_batch, x)
            runner.backward_weights(micro_batch)
            return None
        except Exception as error:
            error.add_note(f"in the pipeline's action {action}: stage {action.stage}, micro-batch {micro_batch}")
            raise


class _Mail:
    """The messages of one step that are under way: expected, sent, or handed over within the rank."""

    def __init__(
        self, channels: Channels, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._channels, self._shapes, self._dtype, self._device = channels, shapes, dtype, device
        self._expected: dict[Message, tuple[Tensor, Work]] = {}
        self._handed: dict[Message, Tensor] = {}
        self._sent: dict[Message, tuple[Tensor, Work]] = {}

    def expect(self, messages: Sequence[Message]) -> None:
        """Start to receive."""
        for message in messages:
            x = torch.empty(self._shapes[message.micro_batch], dtype=self._dtype, device=self._device)
            self._expected[message] = x, self._channels.receive(message, x)

    def take(self, message: Message) -> Tensor:
        """A message that is needed now; waits for it."""
        if message.sender == message.receiver:
            return self._handed.pop(message)
        x, work = self._expected.pop(message)
        self._channels.wait(message, work)
        return x

    def give(self, message: Message, x: Tensor) -> None:
        """Start to send, or hand over to another stage of this rank."""
        if message.sender == message.receiver:
            self._handed[message] = x
            return
        shape = tuple(self._shapes[message.micro_batch])
        assert x.shape == shape, f"stage {message.source} made {tuple(x.shape)}, stage {message.stage} expects {shape}"
        assert x.dtype == self._dtype, f"stage {message.source} made {x.dtype}, messages are {self._dtype}"
        x = x.contiguous()
        self._sent[message] = x, self._channels.send(message, x)

    def release(self, messages: Sequence[Message]) -> None:
        """Let go of the buffers of messages that have arrived; this waits for nothing."""
        for message in messages:
            self._channels.wait(message, self._sent.pop(message)[1])

    def finish(self) -> None:
        """Wait until all that was sent is gone."""
        self.release(list(self._sent))
        assert not self._expected and not self._handed, "messages were made that nobody needed"
