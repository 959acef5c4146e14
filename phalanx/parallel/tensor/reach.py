"""What ``parallel.tensor_overlap = "auto"`` comes to: fused where GPUs of a tensor group reach each other's memory.

Each rank says where it computes, all hear it, and each looks whether its own device can read those of its group. One
that cannot decides for all, so that every rank of a run does the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from phalanx.core.kernel_files import boot_id
from phalanx.core.layout import Layout
from phalanx.core.peers import Peers

SHARED_DEVICE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""With 1, torch lets several ranks of symmetric memory be on one device: for tests."""


class Seat(NamedTuple):
    """Where a rank computes.

    Attributes:
        host: the same for all ranks of a host.
        gpu: the device's unique id; empty on a CPU.
    """

    host: str
    gpu: str


class Reach(NamedTuple):
    """What a process knows of devices.

    Attributes:
        visible: number of each device that it sees, by unique id.
        can_access: whether the first device reaches the memory of the second.
        may_share: whether ranks may be on one device.
    """

    visible: Mapping[str, int]
    can_access: Callable[[int, int], bool]
    may_share: bool = False


class Chosen(NamedTuple):
    """How collectives run beside products, and why, in a line to show."""

    kind: Literal["none", "chunked", "fused"]
    why: str


def choose_overlap(layout: Layout, peers: Peers, device: torch.device) -> Chosen:
    """What ``"auto"`` comes to; all ranks call it together, and hear the same.

    Args:
        peers: all ranks of the layout.
        device: on which this rank computes.
    """
    if layout.tensor == 1:
        return Chosen("none", "")
    gpus = [unique_id(index) for index in range(torch.cuda.device_count())] if device.type == "cuda" else []
    own = Seat(boot_id(), gpus[device.index] if gpus else "")
    seats = [Seat(*seat) for seat in peers.gather(list(own))]
    reach = Reach(
        {gpu: index for index, gpu in enumerate(gpus)},
        torch.cuda.can_device_access_peer,
        os.environ.get(SHARED_DEVICE) == "1",
    )
    obstacle = obstacle_to_sharing(seats, layout.members(peers.rank, ("tensor",)), peers.rank, reach)
    first = peers.lowest([peers.rank, obstacle] if obstacle else None)
    return chosen(first[1] if first else "")


def chosen(in_the_way: str) -> Chosen:
    """The choice, given what is in the way of the first rank that something is in the way of; empty: nothing is."""
    kind: Literal["chunked", "fused"] = "chunked" if in_the_way else "fused"
    reason = in_the_way or "the GPUs of each tensor group reach each other's memory"
    return Chosen(kind, f"parallel.tensor_overlap = 'auto' is '{kind}': {reason}")


def obstacle_to_sharing(seats: Sequence[Seat], members: Sequence[int], rank: int, reach: Reach) -> str:
    """Why `rank` cannot read the memory of all the others of its group; empty where it can.

    Args:
        seats: of all ranks.
        members: ranks of the group.
        reach: what `rank` knows of devices.
    """
    own = seats[rank]
    if not own.gpu:
        return "it computes on a CPU"
    for other in (member for member in members if member != rank):
        seat = seats[other]
        if seat.host != own.host:
            return f"ranks {rank} and {other} are on different hosts"
        if seat.gpu == own.gpu:
            if not reach.may_share:
                return f"ranks {rank} and {other} share a GPU"
        elif seat.gpu not in reach.visible:
            return f"rank {rank} does not see the GPU of rank {other} (CUDA_VISIBLE_DEVICES)"
        elif not reach.can_access(reach.visible[own.gpu], reach.visible[seat.gpu]):
            return f"the GPU of rank {rank} cannot reach the memory of that of rank {other}"
    return ""


def unique_id(index: int) -> str:
    """Of a CUDA device, the same in every process."""
    return str(torch.cuda.get_device_properties(index).uuid)
