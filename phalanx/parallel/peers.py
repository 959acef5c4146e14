"""`phalanx.core.peers.Peers` over a group of CPU tensors: values travel as JSON text, so nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp

from phalanx.core.layout import Axis
from phalanx.parallel.group import Group


class GroupPeers:
    """The members of a group as peers.

    Args:
        group: with a back end that takes CPU tensors (gloo).
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self._group.index

    @property
    def size(self) -> int:
        """Members."""
        return self._group.size

    def gather(self, value: Any) -> list[Any]:
        """The values of all members, in order, on every member."""
        text = _encode(value)
        lengths = torch.empty(self.size, dtype=torch.int64)
        self._group.all_gather(lengths, torch.tensor([len(text)])).wait()
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(text)] = text
        texts = torch.empty(self.size * longest, dtype=torch.uint8)
        self._group.all_gather(texts, padded).wait()
        return [_decode(row[:length]) for row, length in zip(texts.view(self.size, -1), lengths.tolist(), strict=True)]

    def broadcast(self, value: Any) -> Any:
        """The first member's value, on every member."""
        text = _encode(value if self.rank == 0 else None)
        length = torch.tensor([len(text)])
        self._group.broadcast(length).wait()
        if self.rank:
            text = torch.empty(int(length), dtype=torch.uint8)
        self._group.broadcast(text).wait()
        return _decode(text)

    def barrier(self) -> None:
        """Wait until every member is here."""
        self._group.barrier()

    def ask_highest(self, value: int) -> Callable[[], int]:
        """Begin to ask all members for a number; what is returned waits for the highest of them."""
        number = torch.tensor([value])
        work = self._group.all_reduce(number, ReduceOp.MAX)

        def answer() -> int:
            work.wait()
            return int(number)

        return answer


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


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: torch.Tensor) -> Any:
    return json.loads(text.numpy().tobytes())
