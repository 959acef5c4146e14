"""torch's fused operators over symmetric memory, and whether the GPUs of a tensor group reach each other's memory.

The back end for GPUs that read each other's memory over NVLink. ``symm_mem::fused_all_gather_matmul`` and
``fused_matmul_reduce_scatter`` are private to torch and used in this file alone; tests/parallel/test_tensor_fused.py
says what they must do. They find the group by a name that it is registered under
(`phalanx.parallel.mesh.Mesh.registered`).

*Gather, multiply*: every rank copies its rows into a buffer that the others can read, multiplies them, and then fetches
and multiplies those of one peer after another, on two streams in turn, so that a copy runs beside a product. *Multiply,
scatter*: the products of other ranks' rows are written into two such buffers in turn, from which the others fetch them;
they are added when all are there, in the order of ranks, so that the same inputs give the same bits.

Both wait for the peers on the device, without end: a rank that is gone leaves the others waiting until their supervisor
ends them. Several ranks may be on one device where TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, for tests.

``parallel.tensor_overlap = "auto"`` comes to this where GPUs of a tensor group reach each other's memory. Each rank
says where it computes, all hear it, and each looks whether its own device can read those of its group. One that cannot
decides for all, so that every rank of a run does the same.

Shapes: T tokens, n ranks, R = T / n rows of this rank, I inputs, O outputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed import distributed_c10d as c10d

from phalanx.core.errors import UserError
from phalanx.core.host import boot_id
from phalanx.core.layout import Layout
from phalanx.core.peers import Peers
from phalanx.parallel.group import Group
from phalanx.parallel.tensor.overlap import Overlap, Pending

# Enough to see that the members can reach each other; torch makes the workspace larger when it needs more.
_PROBE_BYTES = 1 << 20


class FusedOverlap(Overlap):
    """Collectives fused with products, one peer's rows at a time; torch knows the group of GPUs by `name`."""

    def __init__(self, group: Group, name: str) -> None:
        super().__init__(group)
        self.name = name

    def gather(self, x_RI: Tensor) -> Pending:
        """See `Overlap.gather`; an ordinary collective, beside whatever product comes."""
        out = x_RI.new_empty(self.group.size * x_RI.shape[0], x_RI.shape[1])
        work = self.group.all_gather(out, x_RI.contiguous())

        def finish() -> Tensor:
            work.wait()
            return out

        return Pending(finish)

    def gather_products(
        self, x_RI: Tensor, matrices_IO: Sequence[Tensor], biases_O: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Overlap.gather_products`."""
        self.group.traffic.add("all_gather", x_RI.numel() * x_RI.element_size() * (self.group.size - 1))
        x_TI, outs = torch.ops.symm_mem.fused_all_gather_matmul(x_RI.contiguous(), list(matrices_IO), 0, self.name)
        return x_TI, [out if bias is None else out.add_(bias) for out, bias in zip(outs, biases_O, strict=True)]

    def products_scatter(self, inputs_TI: Sequence[Tensor], matrices_IO: Sequence[Tensor]) -> Pending:
        """See `Overlap.products_scatter`; several products are one of their stacked inputs, to be scattered once."""
        x_TI, matrix_IO = stacked(inputs_TI, matrices_IO)
        sent_bytes = x_TI.shape[0] * matrix_IO.shape[1] * x_TI.element_size()
        self.group.traffic.add("reduce_scatter", sent_bytes * (self.group.size - 1) // self.group.size)
        out = torch.ops.symm_mem.fused_matmul_reduce_scatter(x_TI, matrix_IO, "sum", 0, self.name)
        return Pending.done(out)


def stacked(inputs_TI: Sequence[Tensor], matrices_IO: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One input and one matrix, whose product is the sum of those given."""
    if len(inputs_TI) == 1:
        return inputs_TI[0], matrices_IO[0]
    return torch.cat(list(inputs_TI), dim=1), torch.cat(list(matrices_IO), dim=0)


def require_symmetric_memory(name: str, kind: str = "fused") -> None:
    """Refuse symmetric memory where the members of the group `name` cannot have it; all of them call this.

    Raises:
        UserError: there is no GPU, or the group's GPUs cannot reach each other's memory.
    """
    if not torch.cuda.is_available():
        raise _refused("there is no CUDA device", kind)
    try:
        symmetric_memory.get_symm_mem_workspace(c10d.GroupName(name), _PROBE_BYTES)
    except RuntimeError as error:
        raise _refused(str(error).splitlines()[0], kind) from error


def _refused(reason: str, kind: str) -> UserError:
    problem = f"needs GPUs of one host that reach each other's memory over NVLink ({reason})"
    return UserError(problem, cure="set it to 'chunked'", field="parallel.tensor_overlap", value=kind)


SHARED_DEVICE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""With 1, torch lets several ranks of symmetric memory be on one device: for tests."""


class Seat(NamedTuple):
    """Where a rank computes."""

    host: str  # the same for all ranks of a host
    gpu: str  # the device's unique id; empty on a CPU


class Reach(NamedTuple):
    """What a process knows of devices."""

    visible: Mapping[str, int]  # number of each device that it sees, by unique id
    can_access: Callable[[int, int], bool]  # whether the first device reaches the memory of the second
    may_share: bool = False  # whether ranks may be on one device


class Chosen(NamedTuple):
    """How collectives run beside products, and why, in a line to show."""

    kind: Literal["none", "chunked", "fused"]
    why: str


def choose_overlap(
    layout: Layout, peers: Peers, device: torch.device
) -> tuple[Literal["none", "chunked", "fused"], str]:
    """What ``"auto"`` comes to on `device`; all ranks call it together, and get the same."""
    if layout.tensor == 1:
        return Chosen("none", "")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    gpus = [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]  # the same in every process
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
    """Why `rank` cannot read the memory of all the other `members` of its group; empty where it can."""
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
