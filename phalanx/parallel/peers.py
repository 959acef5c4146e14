"""The members of a data-parallel group as the checkpoint room sees them."""

from __future__ import annotations

import torch

from phalanx.core.layout import Axis
from phalanx.parallel.group import Group


class GroupCopies:
    """The members of a data-parallel group as `phalanx.core.peers.Copies`.

    Args:
        group: over `axes`; its back end takes tensors of `device`.
        device: others go through it.
    """

    def __init__(self, group: Group, axes: tuple[Axis, ...], device: torch.device) -> None:
        self.axes, self._group, self._device = axes, group, device

    @property
    def index(self) -> int:
        """This rank's place in the group."""
        return self._group.index

    @property
    def size(self) -> int:
        """Members."""
        return self._group.size

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give the contiguous `tensor` of member `source` to all, in place."""
        carried = tensor.to(self._device)
        self._group.broadcast(carried, source).wait()
        if carried is not tensor and source != self.index:
            tensor.copy_(carried)
