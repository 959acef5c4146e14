"""Collectives and matrix products in chunks of token rows, pipelined: the back end for any device.

The idea is that of MegaScale (arXiv 2402.15627, section 3.2) and Flux (arXiv 2406.06858): a product of many rows is
many products of few rows, so each can begin when its rows have come, or send its rows when they are done.

*Gather, then multiply*: all chunks' gathers are started at once; this rank's own rows, which need nobody, are
multiplied first, then the others' as they come. *Multiply, then scatter*: the rows of other ranks are multiplied
first, a chunk at a time, and sent as soon as they are done; this rank's own rows come last, while the last chunks
travel, and what the others sent is added to them. A scatter is an all-to-all and a local sum, as in Flux.

On a CPU the collectives run in gloo's threads; on a GPU in the stream of NCCL, which waits for the products, and whose
results the products wait for, without the host. Equal to the plain back end but for the order in which sums of more
than two ranks are rounded.

Shapes: T tokens, n ranks, R = T / n rows of this rank, C rows of a chunk on each rank, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.kernels.linear import project
from phalanx.parallel.group import Group, Work
from phalanx.parallel.tensor.overlap import Pending, sum_of_products


class ChunkedOverlap:
    """Pipelined chunks.

    Args:
        group: of two ranks or more.
        chunks: into how many the rows of each rank are cut.
    """

    def __init__(self, group: Group, chunks: int) -> None:
        assert group.size > 1 and chunks > 0
        self.group, self.chunks = group, chunks

    def gather(self, x_RI: Tensor) -> Pending:
        """See `Overlap.gather`; in one piece, since all of it is needed at once."""
        out = x_RI.new_empty(self.group.size * x_RI.shape[0], x_RI.shape[1])
        work = self.group.all_gather(out, x_RI)

        def finish() -> Tensor:
            work.wait()
            return out

        return Pending(finish)

    def gather_products(
        self, x_RI: Tensor, matrices_IO: Sequence[Tensor], biases_O: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Overlap.gather_products`."""
        size, rows = self.group.size, x_RI.shape[0]
        chunks = self._chunks(rows)
        coming = [self._start_gather(x_RI[chunk]) for chunk in chunks]
        x_nRI = x_RI.new_empty(size, *x_RI.shape)
        outs = [x_RI.new_empty(size, rows, m.shape[1]) for m in matrices_IO]

        def multiply(member: int, chunk: slice) -> None:
            for out, matrix, bias in zip(outs, matrices_IO, biases_O, strict=True):
                product_into(out[member, chunk], x_nRI[member, chunk], matrix, bias)

        x_nRI[self.group.index] = x_RI
        multiply(self.group.index, slice(0, rows))
        for chunk, (work, x_nCI) in zip(chunks, coming, strict=True):
            work.wait()
            for member in self._others():
                x_nRI[member, chunk] = x_nCI[member]
                multiply(member, chunk)
        return x_nRI.flatten(0, 1), [out.flatten(0, 1) for out in outs]

    def products_scatter(self, inputs_TI: Sequence[Tensor], matrices_IO: Sequence[Tensor]) -> Pending:
        """See `Overlap.products_scatter`."""
        blocks = [x.view(self.group.size, -1, x.shape[1]) for x in inputs_TI]
        chunks = self._chunks(blocks[0].shape[1])
        going = [self._start_scatter(blocks, matrices_IO, chunk) for chunk in chunks]
        own_RO = sum_of_products([block[self.group.index] for block in blocks], matrices_IO)

        def finish() -> Tensor:
            # A copy: selective recompute may keep what a product gave, and refuses to see it changed.
            out_RO = own_RO.to(torch.promote_types(own_RO.dtype, torch.float32), copy=True)
            for chunk, (work, _, received_nCO) in zip(chunks, going, strict=True):
                work.wait()
                for member in self._others():
                    out_RO[chunk] += received_nCO[member]
            return out_RO.to(own_RO.dtype)

        return Pending(finish)

    def _start_gather(self, x_CI: Tensor) -> tuple[Work, Tensor]:
        x_nCI = x_CI.new_empty(self.group.size, *x_CI.shape)
        return self.group.all_gather(x_nCI.flatten(0, 1), x_CI), x_nCI

    def _start_scatter(
        self, blocks_nRI: Sequence[Tensor], matrices_IO: Sequence[Tensor], chunk: slice
    ) -> tuple[Work, Tensor, Tensor]:
        """Multiply one chunk of the rows of every other rank, and send it there; what is sent must live till then."""
        rows = chunk.stop - chunk.start
        sent_nCO = matrices_IO[0].new_empty(self.group.size, rows, matrices_IO[0].shape[1])
        for member in self._others():
            sum_into(sent_nCO[member], [block[member, chunk] for block in blocks_nRI], matrices_IO)
        received_nCO = torch.empty_like(sent_nCO)
        return self.group.all_to_all(received_nCO, sent_nCO), sent_nCO, received_nCO

    def _chunks(self, rows: int) -> list[slice]:
        """`rows` rows cut evenly; all ranks have equally many, so cut alike."""
        count = min(self.chunks, rows)
        borders = [rows * i // count for i in range(count + 1)]
        return [slice(*pair) for pair in itertools.pairwise(borders)]

    def _others(self) -> list[int]:
        """The other members, the next one first, so that no two ranks send to the same one at a time."""
        return [(self.group.index + step) % self.group.size for step in range(1, self.group.size)]


def product_into(out_TO: Tensor, x_TI: Tensor, matrix_IO: Tensor, bias_O: Tensor | None) -> None:
    """``out = x @ matrix + bias``; for a part of a tensor that is made in parts."""
    if bias_O is not None:
        torch.addmm(bias_O, x_TI, matrix_IO, out=out_TO)
    elif x_TI.device.type == "cpu" and x_TI.dtype == torch.float32:
        out_TO.copy_(project(x_TI, matrix_IO))  # Its library is the faster one, but cannot write into a given tensor.
    else:
        torch.mm(x_TI, matrix_IO, out=out_TO)


def sum_into(out_TO: Tensor, inputs_TI: Sequence[Tensor], matrices_IO: Sequence[Tensor]) -> None:
    """``out = sum(x @ m)``."""
    if len(inputs_TI) == 1:
        product_into(out_TO, inputs_TI[0], matrices_IO[0], None)
    else:
        out_TO.copy_(sum_of_products(inputs_TI, matrices_IO))
