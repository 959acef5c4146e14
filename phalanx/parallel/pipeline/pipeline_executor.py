"""Runs one rank's part of a pipeline schedule, and carries its messages to its neighbours.

Messages have one group per direction and pair of neighbours. With one group for both directions, NCCL, which keeps the
order of calls within a communicator, could hold a send until a receive that was posted before it is done; with one for
each, neither direction waits for the other.

Sends and receives are apart from each other and asynchronous (MegaScale, arXiv 2402.15627, section 3.2): receives are
started ahead of their turn, sends are started and left alone. A rank waits only for the very message that its next
action needs, so a late peer does not hold up what does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.parallel.deferred_gradients import WeightQueue
from phalanx.parallel.group import Group, Groups, Work
from phalanx.parallel.pipeline.schedules import Message, Placement, Step, Table, channels, route


class PipelineError(RuntimeError):
    """A message did not get through: which stage and micro-batch it was about, and with which rank."""


class _Channels:
    """The channels of one pipeline rank; opened here, which all ranks of the pipeline do together."""

    def __init__(self, groups: Groups, placement: Placement, device: torch.device) -> None:
        self._global_ranks = groups.layout.members(groups.rank, ("pipeline",))
        assert len(self._global_ranks) == placement.ranks, "the layout's pipeline axis and the table do not fit"
        self.rank = self._global_ranks.index(groups.rank)
        self._groups: dict[tuple[int, int], Group] = {}
        for pair in channels(placement):
            if self.rank not in pair:
                continue
            sender, receiver = (self._global_ranks[rank] for rank in pair)
            group = groups.named(f"pipeline {sender} to {receiver}", sorted((sender, receiver)), ("pipeline",))
            try:
                assert group.backend is not None
                # NCCL connects at the first use and blocks both ends until then. Were that in a schedule, a rank could
                # wait for a neighbour that waits for another, and so around; here all open theirs in the same order.
                if group.keeps_order:
                    first = torch.zeros(1, device=device)
                    there = 1 - group.index
                    (group.send(first, there) if self.rank == pair[0] else group.receive(first, there)).wait()
            except RuntimeError as error:
                raise PipelineError(
                    f"the pipeline's channel from rank {sender} to rank {receiver} did not open: {error}"
                ) from error
            self._groups[pair] = group

    def start(self, message: Message, x: Tensor) -> Work:
        group = self._groups[message.sender, message.receiver]
        with self._naming(message):
            start = group.send if message.sender == self.rank else group.receive
            what = f"{message.content} of stage {message.source}"
            return start(x, 1 - group.index, message.order, what, message.micro_batch)

    def wait(self, message: Message, work: Work) -> None:
        with self._naming(message):
            work.wait()

    @contextmanager
    def _naming(self, message: Message) -> Iterator[None]:
        """An error within it comes with stage, micro-batch and peer of `message`."""
        try:
            yield
        except RuntimeError as error:
            here, there, doing, peer = message.stage, message.source, "receiving", message.sender
            if message.sender == self.rank:
                here, there, doing, peer = there, here, "sending", message.receiver
            whose = f"{'to' if doing == 'sending' else 'from'} rank {self._global_ranks[peer]}"
            raise PipelineError(
                f"stage {here}, micro-batch {message.micro_batch}: {doing} {message.content} {whose} (stage {there}) "
                f"failed on rank {self._global_ranks[self.rank]}: {error}"
            ) from error


class _Live(NamedTuple):
    x: Tensor | None
    output: GradientEdge  # holds the graph without the values of the stage's output, which are free once they are sent


class AutogradStage:
    """One stage, as the executor runs it: any differentiable function of activations (T, D).

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
        """All gradients of `micro_batch`, from that of the output (None on the last stage); returns the input's."""
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


class PipelineExecutor:
    """The stages of one rank, and the channels to its neighbours, opened once for all steps.

    Raises:
        PipelineError: a neighbour did not come.
    """

    def __init__(
        self,
        groups: Groups,  # of this rank. All ranks along the pipeline axis make their executor at the same time
        placement: Placement,  # of the stages over pipeline ranks; every table that is run has an equal one
        runners: Mapping[int, AutogradStage],  # of this rank's stages, by stage
        *,
        dtype: torch.dtype = torch.float32,  # of activations and their gradients: the model's residual dtype
        device: torch.device | str = "cpu",
        look_ahead: int = 2,  # receives started before their turn. More hide longer delays and hold more activations
    ) -> None:
        self._device, self._dtype, self._look_ahead = torch.device(device), dtype, look_ahead
        self._channels = _Channels(groups, placement, self._device)
        self._placement, self._runners = placement, runners
        assert sorted(runners) == placement.stages_of(self.rank), f"rank {self.rank} has other stages"
        self._steps: dict[Table, list[Step]] = {}

    @property
    def rank(self) -> int:
        """Place on the pipeline axis."""
        return self._channels.rank

    def run(self, table: Table, shapes: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """Run this rank's actions, and wait until all that was sent is gone.

        `shapes` are those of the activations between stages on this rank, one per micro-batch.

        Returns:
            What the last stage's forward passes returned, by micro-batch; empty on ranks that do not have it.

        Raises:
            PipelineError: a peer is gone or too late; names stage, micro-batch and peer.
        """
        assert table.placement == self._placement, "the table places stages elsewhere"
        assert len(shapes) == table.micro_batches, "one shape per micro-batch"
        mail = _Mail(self._channels, shapes, self._dtype, self._device)
        results: dict[int, Tensor] = {}
        if table not in self._steps:
            self._steps[table] = route(table, self.rank, self._look_ahead)
        for step in self._steps[table]:
            result = self._perform(step, mail)
            if result is not None and step.action.kind == "F":
                results[step.action.micro_batch] = result
        mail.finish()
        return results

    def _perform(self, step: Step, mail: _Mail) -> Tensor | None:
        """One action with the communication around it; what it made, if no other stage needs it."""
        # Receives of later actions are posted before this one waits: a peer that is ready can send at once, and two
        # neighbours that wait for each other's messages cannot deadlock.
        mail.expect(step.post)
        x = None if step.need is None else mail.take(step.need)
        # That a message came back which was made from ours proves that ours has arrived: its buffer is let go without
        # a wait, and sent activations do not pile up until the end of the step.
        mail.release(step.confirmed)
        stage, kind, micro_batch = step.action
        runner, made = self._runners[stage], None
        try:
            if kind == "F":
                made = runner.forward(micro_batch, x)
            elif kind == "B":
                made = runner.backward(micro_batch, x)
            elif kind == "I":
                made = runner.backward_input(micro_batch, x)
            else:
                runner.backward_weights(micro_batch)
        except Exception as error:
            error.add_note(f"in the pipeline's action {step.action}: stage {stage}, micro-batch {micro_batch}")
            raise
        if step.give is None:
            return made
        assert made is not None, f"{step.action} made nothing for stage {step.give.stage}"
        mail.give(step.give, made)
        return None


class _Mail:
    def __init__(
        self, channels: _Channels, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._channels, self._shapes, self._dtype, self._device = channels, shapes, dtype, device
        self._expected: dict[Message, tuple[Tensor, Work]] = {}
        self._handed: dict[Message, Tensor] = {}
        self._sent: dict[Message, tuple[Tensor, Work]] = {}

    def expect(self, messages: Sequence[Message]) -> None:
        for message in messages:
            x = torch.empty(self._shapes[message.micro_batch], dtype=self._dtype, device=self._device)
            self._expected[message] = x, self._channels.start(message, x)

    def take(self, message: Message) -> Tensor:
        # Two stages of one rank (interleaved and V schedules) hand over the tensor itself.
        if message.sender == message.receiver:
            return self._handed.pop(message)
        x, work = self._expected.pop(message)
        self._channels.wait(message, work)
        return x

    def give(self, message: Message, x: Tensor) -> None:
        if message.sender == message.receiver:
            self._handed[message] = x
            return
        shape = tuple(self._shapes[message.micro_batch])
        assert x.shape == shape, f"stage {message.source} made {tuple(x.shape)}, stage {message.stage} expects {shape}"
        assert x.dtype == self._dtype, f"stage {message.source} made {x.dtype}, messages are {self._dtype}"
        # Kept until its work is done: the send reads this memory while later actions run.
        x = x.contiguous()
        self._sent[message] = x, self._channels.start(message, x)

    def release(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._channels.wait(message, self._sent.pop(message)[1])

    def finish(self) -> None:
        self.release(list(self._sent))
        assert not self._expected and not self._handed, "messages were made that no stage needed"
