"""The ranks of torch.distributed as peers, where it is initialised."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from phalanx.core.peers import ALONE, Peers


def find_peers() -> Peers:
    """The ranks of the default group, in a group of their own, which `leave` ends; called by all of them together. Over
    gloo, values stay on the host, and nothing gets between the collectives of training."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    return DistributedPeers(dist.new_group(backend="gloo"))


def leave(peers: Peers) -> None:
    """End the group of `peers`; called by all of them when nothing more will be exchanged.

    A thread of gloo that frees its last operation while Python ends takes the process down with SIGABRT
    (pytorch/pytorch#190489), so none of them may be left. Do not call it where a rank has failed: it would wait for
    what the others had begun.
    """
    if isinstance(peers, DistributedPeers):
        peers.close()


class DistributedPeers:
    """The members of a process group, whose back end takes CPU tensors (gloo), as `phalanx.core.peers.Peers`; values
    travel as JSON text."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._groups = [group]  # the only reference: gloo ends when that is dropped

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._groups[0]

    def close(self) -> None:
        """End the group and its threads, unless they have ended already."""
        groups, self._groups = self._groups, []
        if dist.is_initialized():
            for group in groups:
                dist.destroy_process_group(group)

    def gather(self, value: Any) -> list[Any]:
        """The values of all members, in order, on every member."""
        text = _encode(value)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(text)]), group=self._group)
        padded = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
        padded[: len(text)] = text
        texts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(texts, padded, group=self._group)
        return [_decode(row[: int(length)]) for row, length in zip(texts, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """The first member's value, on every member."""
        text = _encode(value if self.rank == 0 else None)
        length = torch.tensor([len(text)])
        first = dist.get_global_rank(self._group, 0)
        dist.broadcast(length, first, group=self._group)
        if self.rank:
            text = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, first, group=self._group)
        return _decode(text)

    def collect(self, value: Any) -> list[Any] | None:
        """The values of all members, in order, on the first."""
        values = self.gather(value)
        return None if self.rank else values

    def lowest(self, value: Any) -> Any:
        """The lowest of the values that are not None, on every member."""
        return min((one for one in self.gather(value) if one is not None), default=None)

    def barrier(self) -> None:
        """Wait until every member is here."""
        dist.barrier(group=self._group)

    def ask_highest(self, value: int) -> Callable[[], int]:
        """Begin to ask all members for a number; what is returned waits for the highest of them."""
        number = torch.tensor([value])
        work = dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group, async_op=True)

        def answer() -> int:
            if work is not None:
                work.wait()
            return int(number)

        return answer


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: torch.Tensor) -> Any:
    return json.loads(text.numpy().tobytes())
