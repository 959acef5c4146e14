"""Messages between the ranks of a pipeline: one group per direction and pair of neighbours.

With one group for both directions, NCCL, which keeps the order of calls within a communicator, could hold a send until
a receive that was posted before it is done; with one for each, neither direction waits for the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.parallel.group import Group, Groups, Work
from phalanx.parallel.pipeline.routes import Message, channels
from phalanx.parallel.pipeline.tables import Placement


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
            if group.keeps_order:
                first = torch.zeros(1, device=device)
                there = group.ranks.index(members[1] if self.rank == sender else members[0])
                (group.send(first, there) if self.rank == sender else group.receive(first, there)).wait()
        except RuntimeError as error:
            raise PipelineError(
                f"the pipeline's channel from rank {members[0]} to rank {members[1]} did not open: {error}"
            ) from error
        return group
