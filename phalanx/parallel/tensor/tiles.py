"""Collectives fused with products tile by tile (Flux): our Triton kernels over memory that the GPUs of a group share.

*Gather, multiply*: every rank puts its rows where the others can read them; copies in a stream of their own fetch those
of one rank after another, chunk by chunk, and set a signal after each, for which the tiles of the product that need
it wait. *Multiply, scatter*: tiles of the product are written to the ranks whose rows they are of, which add them up as
they come. What kernels do and signals mean: `phalanx.kernels.products_triton`.

No wait is in vain. A product waits only for copies that were given to the device before it, and copies
for nothing but the meeting of all ranks before them; the product leaves a few multiprocessors to copies that need one
(those within a device do). Products that are scattered do not wait, and sums wait for products that do not.

Memory of one call is used by the next: all ranks meet on the device before anything of it is overwritten. Calls are
numbered alike on all ranks. Like torch's own operators, ranks wait for each other without end, and the number of a call
is an argument of its kernels, so that this does not go into CUDA graphs.

Shapes: T tokens, n ranks, R = T / n rows of this rank, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory as TorchMemory
from torch.distributed import distributed_c10d as c10d

from phalanx.core.errors import UserError
from phalanx.parallel.group import Group
from phalanx.parallel.tensor.fused import FusedOverlap, stacked
from phalanx.parallel.tensor.overlap import Pending

if TYPE_CHECKING:
    from phalanx.kernels.products_triton import Blocks

_SPARE_MULTIPROCESSORS = 8
_CHUNKS = 4
"""Pieces in which the rows of each rank are fetched."""


class _CopyStream:
    """A stream beside the current one, where copies run beside products."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def beside(self) -> AbstractContextManager[Any]:
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def signal(self, signals: Tensor, index: int, call: int) -> None:
        # Written by the stream, not by a multiprocessor, and with a fence of the whole system before it.
        TorchMemory.stream_write_value32(signals, index, call)

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)


class _SymmetricMemory:
    """Memory that all ranks of a group have alike and reach; it grows, and what is new of it is zero.

    All ranks make the same calls of `reserve` and `meet`.
    """

    def __init__(self, name: str, size: int, device: torch.device) -> None:
        self._name, self._size, self._device = c10d.GroupName(name), size, device
        self._memory: Tensor | None = None
        self._handle: Any = None
        self.addresses = torch.empty(0, dtype=torch.int64)  # of each rank's memory, (n,)

    def reserve(self, size_bytes: int) -> None:
        """Have at least so much; where there is less, all ranks wait for each other, and their devices."""
        if self._memory is not None and self._memory.numel() >= size_bytes:
            return
        if self._handle is not None:
            self._handle.barrier()
            torch.cuda.synchronize(self._device)  # the memory of before, which goes now, is no longer in use
        self._memory = TorchMemory.empty_strided_p2p((size_bytes,), [1], torch.uint8, self._device, self._name)
        self._memory.zero_()
        self._handle = TorchMemory.rendezvous(self._memory)
        pointers = [self.of(rank, (size_bytes,), torch.uint8).data_ptr() for rank in range(self._size)]
        self.addresses = torch.tensor(pointers, dtype=torch.int64, device=self._device)
        self._handle.barrier()  # no rank writes before all are zero

    def meet(self, channel: int) -> None:
        """Wait, in the order of the stream, until all ranks have come here."""
        self._handle.barrier(channel=channel)

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        memory: Tensor = self._handle.get_buffer(rank, list(shape), dtype)
        return memory


class TilesOverlap(FusedOverlap):
    """Collectives fused with products tile by tile; `tiles_on_gpu` makes one.

    Memory for rows and partial sums, and for signals, is of this object alone. At most `programs` run at a time; fewer
    where they may wait, to leave room for copies.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        rows: _SymmetricMemory,
        signals: _SymmetricMemory,
        lane: _CopyStream,
        device: torch.device,
        programs: int,
        blocks: Blocks | None = None,
    ) -> None:
        from phalanx.kernels import products_triton

        super().__init__(group, name)
        self._kernels, self._blocks = products_triton, blocks
        self._rows, self._signals, self._lane = rows, signals, lane
        self._programs, self._waiting_programs = programs, max(1, programs - _SPARE_MULTIPROCESSORS)
        self._arrived = torch.zeros(group.size * _CHUNKS, dtype=torch.uint32, device=device)
        self._call = 0

    def gather_products(
        self, x_RI: Tensor, matrices_IO: Sequence[Tensor], biases_O: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Overlap.gather_products`."""
        x_RI, size, own = x_RI.contiguous(), self.group.size, self.group.index
        self.group.traffic.add("all_gather", x_RI.numel() * x_RI.element_size() * (size - 1))
        self._call += 1
        self._rows.reserve(x_RI.numel() * x_RI.element_size())
        self._rows.meet(0)  # no rank fetches what was there before
        self._rows.of(own, x_RI.shape, x_RI.dtype).copy_(x_RI)
        x_nRI = x_RI.new_empty(size, *x_RI.shape)
        x_nRI[own] = x_RI
        self._rows.meet(1)
        chunk_rows = max(1, -(-x_RI.shape[0] // _CHUNKS))
        self._fetch(x_nRI, chunk_rows)
        chunks = -(-x_RI.shape[0] // chunk_rows)
        signals = self._arrived.view(torch.int32)[: size * chunks]
        arrivals = self._kernels.Arrivals(signals, chunk_rows, self._call)
        x_TI, blocks = x_nRI.flatten(0, 1), self._blocks
        outs = [
            self._kernels.product_of_arriving(x_TI, matrix, bias, arrivals, own, size, self._waiting_programs, blocks)
            for matrix, bias in zip(matrices_IO, biases_O, strict=True)
        ]
        self._lane.join()
        return x_TI, outs

    def products_scatter(self, inputs_TI: Sequence[Tensor], matrices_IO: Sequence[Tensor]) -> Pending:
        """See `Overlap.products_scatter`; several products are one of their stacked inputs, to be scattered once."""
        x_TI, matrix_IO = stacked(inputs_TI, matrices_IO)
        x_TI, size, own = x_TI.contiguous(), self.group.size, self.group.index
        rows, outputs = x_TI.shape[0] // size, matrix_IO.shape[1]
        self.group.traffic.add("reduce_scatter", rows * outputs * x_TI.element_size() * (size - 1))
        self._call += 1
        blocks = self._blocks or self._kernels.usual_blocks(x_TI)
        tiles = self._kernels.tiles_of(rows, outputs, blocks)
        self._rows.reserve(x_TI.shape[0] * outputs * x_TI.element_size())
        self._signals.reserve(4 * size * tiles)
        self._rows.meet(0)  # no rank adds up, or fetches, what was there before
        owners = self._kernels.Owners(self._rows.addresses, self._signals.addresses, self._call)
        self._kernels.product_to_owners(x_TI, matrix_IO, owners, own, size, self._programs, blocks)
        slots = self._rows.of(own, (size, rows, outputs), x_TI.dtype)
        signals = self._signals.of(own, (size, tiles), torch.int32)
        return Pending.done(self._kernels.sum_of_tiles(slots, signals, self._call, self._waiting_programs, blocks))

    def _fetch(self, x_nRI: Tensor, chunk_rows: int) -> None:
        """Bring the rows of the other ranks, the next one's first, and signal each chunk, in a stream of its own."""
        size, own, rows = self.group.size, self.group.index, x_nRI.shape[1]
        chunks = -(-rows // chunk_rows)
        with self._lane.beside():
            for member in ((own + step) % size for step in range(1, size)):
                theirs_RI = self._rows.of(member, x_nRI.shape[1:], x_nRI.dtype)
                for chunk in range(chunks):
                    some = slice(chunk * chunk_rows, (chunk + 1) * chunk_rows)
                    x_nRI[member, some].copy_(theirs_RI[some])
                    self._lane.signal(self._arrived, member * chunks + chunk, self._call)


def tiles_on_gpu(group: Group, name: str) -> TilesOverlap:
    """For GPUs, for which `phalanx.parallel.tensor.fused.require_symmetric_memory` was called.

    Raises:
        UserError: Triton is not there.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    rows, signals = (_SymmetricMemory(name, group.size, device) for _ in range(2))
    try:
        return TilesOverlap(group, name, rows, signals, _CopyStream(device), device, programs)
    except ImportError as error:
        problem, cure = "needs the package triton, which is not there", "set it to 'fused'"
        raise UserError(problem, cure=cure, field="parallel.tensor_overlap", value="tiles") from error
