"""Runs one rank's part of a pipeline schedule, and carries its messages to its neighbours.

Messages have one group per direction and pair of neighbours.

With one group for both directions, NCCL, which keeps the order of calls within a communicator, could hold a send until
a receive that was posted before it is done; with one for each, neither direction waits for the other.

Sends and receives are apart from each other and asynchronous (MegaScale, arXiv 2402.15627, section 3.2): receives are
started ahead of their turn, sends are started and left alone. A rank waits only for the very message that its next
action needs, so a late peer does not hold up what does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from phalanx.parallel.group import Group, Groups, Work
from phalanx.parallel.pipeline.schedules import Action, Message, Placement, Step, Table, channels, route


class PipelineError(RuntimeError):
    """A message did not get through: which stage and micro-batch it was about, and with which rank."""


class Channels:
    """The channels of one pipeline rank; opened here, which all ranks of the pipeline do together.

    Args:
        groups: of this rank; its layout's pipeline axis has as many ranks as `placement`.
        placement: of the stages.
        device: where the messages are.

    Raises:
        PipelineError: a neighbour did not come.
    """

    def __init__(self, groups: Groups, placement: Placement, device: torch.device) -> None:
        self._global_ranks = groups.layout.members(groups.rank, ("pipeline",))
        assert len(self._global_ranks) == placement.ranks, "the layout's pipeline axis and the table do not fit"
        self.rank = self._global_ranks.index(groups.rank)
        self._groups: dict[tuple[int, int], Group] = {}
        for sender, receiver in channels(placement):
            if self.rank in (sender, receiver):
                self._groups[sender, receiver] = self._open(groups, sender, receiver, device)

    def send(self, message: Message, x: Tensor) -> Work:
        """Start sending contiguous `x`, to be kept unchanged until the work is done.

        Raises:
            PipelineError: the receiver is gone.
        """
        group = self._groups[message.sender, message.receiver]
        try:
            return group.send(x, group.ranks.index(self._global_ranks[message.receiver]), message.order)
        except RuntimeError as error:
            raise self.failure(message, error) from error

    def receive(self, message: Message, x: Tensor) -> Work:
        """Start receiving into contiguous `x`.

        Raises:
            PipelineError: the sender is gone.
        """
        group = self._groups[message.sender, message.receiver]
        try:
            return group.receive(x, group.ranks.index(self._global_ranks[message.sender]), message.order)
        except RuntimeError as error:
            raise self.failure(message, error) from error

    def wait(self, message: Message, work: Work) -> None:
        """Wait until the work of `message` is done.

        Raises:
            PipelineError: the peer is gone, or the time is up.
        """
        try:
            work.wait()
        except RuntimeError as error:
            raise self.failure(message, error) from error

    def failure(self, message: Message, error: BaseException) -> PipelineError:
        """What went wrong with `message`, as this rank sees it."""
        if message.sender == self.rank:
            here, there, doing = message.source, message.stage, "sending"
            peer, preposition = self._global_ranks[message.receiver], "to"
        else:
            here, there, doing = message.stage, message.source, "receiving"
            peer, preposition = self._global_ranks[message.sender], "from"
        return PipelineError(
            f"stage {here}, micro-batch {message.micro_batch}: {doing} {message.content} {preposition} rank {peer} "
            f"(stage {there}) failed on rank {self._global_ranks[self.rank]}: {error}"
        )

    def _open(self, groups: Groups, sender: int, receiver: int, device: torch.device) -> Group:
        """One channel; with NCCL, which connects when it is first used and blocks meanwhile, with a first message."""
        members = (self._global_ranks[sender], self._global_ranks[receiver])
        group = groups.named(f"pipeline {members[0]} to {members[1]}", sorted(members), ("pipeline",))
        try:
            assert group.backend is not None
            # NCCL connects at the first use and blocks both ends until then. Were that in a schedule, a rank could wait
            # for a neighbour that waits for another, and so around; here all open their channels in the same order.
            if group.keeps_order:
                first = torch.zeros(1, device=device)
                there = group.ranks.index(members[1] if self.rank == sender else members[0])
                (group.send(first, there) if self.rank == sender else group.receive(first, there)).wait()
        except RuntimeError as error:
            raise PipelineError(
                f"the pipeline's channel from rank {members[0]} to rank {members[1]} did not open: {error}"
            ) from error
        return group


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
        # Receives of later actions are posted before this one waits: a peer that is ready can send at once, and two
        # neighbours that wait for each other's messages cannot deadlock.
        mail.expect(step.post)
        x = None if step.need is None else mail.take(step.need)
        # That a message came back which was made from ours proves that ours has arrived: its buffer is let go without
        # a wait, and sent activations do not pile up until the end of the step.
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
        # Two stages of one rank (interleaved and V schedules) hand over the tensor itself.
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
        # Kept until its work is done: the send reads this memory while later actions run.
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
