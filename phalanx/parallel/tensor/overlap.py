"""Matrix products beside the collectives they need: the interface, the plain back end, and one in pipelined chunks.

Sequence parallelism (arXiv 2205.05198) leaves two pairs in a layer and their mirrors in backward: an all-gather whose
result is multiplied, and a product whose result is reduce-scattered. A back end decides how the two of a pair run
against each other; what is computed is the same.

========= ===================== ====================================================================================
back end  file                  what it does
========= ===================== ====================================================================================
none      overlap.py            one after the other; also what a group of one runs, without copies
chunked   overlap.py            both cut into chunks of token rows that are pipelined, on any device
fused     fused.py              torch's fused operators over symmetric memory, on GPUs that reach each other's memory
tiles     tiles.py              the same by Triton kernels of ours that wait for rows, and send, tile by tile
========= ===================== ====================================================================================

*The chunked back end*, for any device, pipelines collectives and products in chunks of token rows.

The idea is that of MegaScale (arXiv 2402.15627, section 3.2) and Flux (arXiv 2406.06858): a product of many rows is
many products of few rows, so each can begin when its rows have come, or send its rows when they are done.

*Gather, then multiply*: all chunks' gathers are started at once; this rank's own rows, which are here, are multiplied
first, then the others' as they come. *Multiply, then scatter*: the rows of other ranks are multiplied
first, a chunk at a time, and sent as soon as they are done; this rank's own rows come last, while the last chunks
travel, and what the others sent is added to them. A scatter is an all-to-all and a local sum, as in Flux.

What cannot be hidden is the product of the last chunk that comes, and that of the first one that goes. So the chunks
that come get smaller, and those that go larger: with the same number of chunks less is exposed.

On a CPU the rows go as messages, straight from and to where they belong: gloo sends them one after the other, so that
the first chunk is there when its bytes are, while two of gloo's collectives at a time share the link, and its
all-gather alone took 1.5 times as long (65 ms against 44, 2 MiB at 400 Mbit/s). On a GPU they are collectives, which
NCCL runs in its own stream; it waits for the products, and the products for it, without the host. Equal to the plain
back end but for the order in which sums of more than two ranks are rounded.

Shapes: T tokens, n ranks, R = T / n rows of this rank, C rows of a chunk on each rank, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.kernels.linear import project
from phalanx.parallel.group import Group


class Pending:
    """A tensor on its way; `wait` gives it."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._value: Tensor | None = None

    @staticmethod
    def done(value: Tensor) -> Pending:
        """A tensor that is here."""
        return Pending(lambda: value)

    def wait(self) -> Tensor:
        """The tensor; waits at the first call."""
        if self._finish is not None:
            self._value, self._finish = self._finish(), None
        assert self._value is not None
        return self._value


class Overlap:
    """How collectives run against matrix products: here one after the other, each waited for, or in a group of one.

    All members of the group make the same calls in the same order. Matrices are (I, O), in any layout of memory; rows
    are contiguous. Nothing is differentiated here.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def gather(self, x_RI: Tensor) -> Pending:
        """Start to gather rows that are needed later: (R, I) -> (T, I)."""
        return Pending.done(gather_rows(self.group, x_RI))

    def gather_products(
        self, x_RI: Tensor, matrices_IO: Sequence[Tensor], biases_O: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """The gathered rows (T, I) and their product with each matrix (T, O), plus its bias."""
        x = gather_rows(self.group, x_RI)
        products = [
            project(x, m) if bias is None else torch.addmm(bias, x, m)
            for m, bias in zip(matrices_IO, biases_O, strict=True)
        ]
        return x, products

    def products_scatter(self, inputs_TI: Sequence[Tensor], matrices_IO: Sequence[Tensor]) -> Pending:
        """The sum over ranks of ``sum(x @ m)`` at the rows of this rank, (R, O); the products are made at once."""
        return Pending.done(scatter_rows(self.group, _sum_of_products(inputs_TI, matrices_IO)))


def gather_rows(group: Group, x_R: Tensor) -> Tensor:
    """The rows of all members, (R, …) -> (T, …); `x_R` itself in a group of one."""
    if group.size == 1:
        return x_R
    out = x_R.new_empty(group.size * x_R.shape[0], *x_R.shape[1:])
    group.all_gather(out, x_R.contiguous()).wait()
    return out


def scatter_rows(group: Group, x_T: Tensor) -> Tensor:
    """This rank's rows of the sum over members, (T, …) -> (R, …); added in fp32 or wider, returned as `x_T` is."""
    if group.size == 1:
        return x_T
    dtype = torch.promote_types(x_T.dtype, torch.float32) if x_T.device.type == "cpu" else x_T.dtype
    out = x_T.new_empty(x_T.shape[0] // group.size, *x_T.shape[1:], dtype=dtype)
    group.reduce_scatter(out, x_T).wait()
    return out.to(x_T.dtype)


def _sum_of_products(inputs_TI: Sequence[Tensor], matrices_IO: Sequence[Tensor]) -> Tensor:
    out: Tensor | None = None
    for x, matrix in zip(inputs_TI, matrices_IO, strict=True):
        out = project(x, matrix, out)
    assert out is not None
    return out


Wait = Callable[[], None]

# Messages of one group that are under way at a time have different tags.
_TAGS = 1 << 20


class ChunkedOverlap(Overlap):
    """Pipelined chunks, in a group of two ranks or more.

    Args:
        chunks: into how many the rows of each rank are cut.
        messages: whether rows travel as messages between pairs; None: with gloo. (With NCCL all ranks would wait for
            what they receive before they sent anything.)
    """

    def __init__(self, group: Group, chunks: int, *, messages: bool | None = None) -> None:
        assert group.size > 1 and chunks > 0
        super().__init__(group)
        self.chunks, self.messages = chunks, messages
        self._tag = 0

    def gather(self, x_RI: Tensor) -> Pending:
        """See `Overlap.gather`; in one piece, since all of it is needed at once."""
        x_nRI = self._with_own(x_RI)
        wait = self._start_gather(x_nRI, slice(0, x_RI.shape[0]))

        def finish() -> Tensor:
            wait()
            return x_nRI.flatten(0, 1)

        return Pending(finish)

    def gather_products(
        self, x_RI: Tensor, matrices_IO: Sequence[Tensor], biases_O: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Overlap.gather_products`."""
        chunks = falling_chunks(x_RI.shape[0], self.chunks)
        x_nRI = self._with_own(x_RI)
        coming = [self._start_gather(x_nRI, chunk) for chunk in chunks]
        outs = [x_RI.new_empty(*x_nRI.shape[:2], m.shape[1]) for m in matrices_IO]

        def multiply(member: int, chunk: slice) -> None:
            for out, matrix, bias in zip(outs, matrices_IO, biases_O, strict=True):
                _product_into(out[member, chunk], x_nRI[member, chunk], matrix, bias)

        multiply(self.group.index, slice(None))
        for chunk, wait in zip(chunks, coming, strict=True):
            wait()
            for member in self._others():
                multiply(member, chunk)
        return x_nRI.flatten(0, 1), [out.flatten(0, 1) for out in outs]

    def products_scatter(self, inputs_TI: Sequence[Tensor], matrices_IO: Sequence[Tensor]) -> Pending:
        """See `Overlap.products_scatter`."""
        blocks = [x.view(self.group.size, -1, x.shape[1]) for x in inputs_TI]
        chunks = rising_chunks(blocks[0].shape[1], self.chunks)
        shapes = [(self.group.size, chunk.stop - chunk.start, matrices_IO[0].shape[1]) for chunk in chunks]
        received = [matrices_IO[0].new_empty(shape) for shape in shapes]
        links = [self._open_scatter(x_nCO) for x_nCO in received]
        going = []
        for send, chunk, x_nCO in zip(links, chunks, received, strict=True):
            # What this rank adds to one chunk of the rows of every other member.
            out_nCO = torch.empty_like(x_nCO)
            for member in self._others():
                inputs = [block[member, chunk] for block in blocks]
                if len(inputs) == 1:
                    _product_into(out_nCO[member], inputs[0], matrices_IO[0], None)
                else:
                    out_nCO[member].copy_(_sum_of_products(inputs, matrices_IO))
            going.append(send(out_nCO))
        own_RO = _sum_of_products([block[self.group.index] for block in blocks], matrices_IO)

        def finish() -> Tensor:
            out_RO = torch.empty_like(own_RO, dtype=torch.promote_types(own_RO.dtype, torch.float32))
            for chunk, wait, x_nCO in zip(chunks, going, received, strict=True):
                wait()
                # Added in the type of `out`; `own` stays as it is, for selective recompute may keep it.
                first, *rest = [x_nCO[member] for member in self._others()]
                torch.add(own_RO[chunk].to(out_RO.dtype), first, out=out_RO[chunk])
                for x_CO in rest:
                    out_RO[chunk] += x_CO
            return out_RO.to(own_RO.dtype)

        return Pending(finish)

    def _with_own(self, x_RI: Tensor) -> Tensor:
        x_nRI = x_RI.new_empty(self.group.size, *x_RI.shape)
        x_nRI[self.group.index] = x_RI
        return x_nRI

    def _start_gather(self, x_nRI: Tensor, chunk: slice) -> Wait:
        own_CI = x_nRI[self.group.index, chunk]
        if self._by_messages(own_CI):
            others = self._others()
            return self._open({m: x_nRI[m, chunk] for m in others})(dict.fromkeys(others, own_CI))
        x_nCI = torch.empty_like(x_nRI[:, chunk])
        work = self.group.all_gather(x_nCI.flatten(0, 1), own_CI)

        def wait() -> None:
            work.wait()
            x_nRI[:, chunk] = x_nCI

        return wait

    def _open_scatter(self, received_nCO: Tensor) -> Callable[[Tensor], Wait]:
        """Be ready for what the other members send; gives the function that sends them theirs."""
        others = self._others()
        if self._by_messages(received_nCO):
            send = self._open({m: received_nCO[m] for m in others})
            return lambda sent_nCO: send({m: sent_nCO[m] for m in others})
        received = received_nCO.flatten(0, 1)
        return lambda sent_nCO: self.group.all_to_all(received, sent_nCO.flatten(0, 1)).wait

    def _open(self, received: Mapping[int, Tensor]) -> Callable[[Mapping[int, Tensor]], Wait]:
        """Be ready for a message from each of some members; gives the function that sends one to each.

        A message whose receiver is ready leaves at once. All members count tags alike.
        """
        self._tag = tag = (self._tag + 1) % _TAGS
        works = [self.group.receive(x, member, tag) for member, x in received.items()]

        def send(sent: Mapping[int, Tensor]) -> Wait:
            works.extend(self.group.send(x, member, tag) for member, x in sent.items())

            def wait() -> None:
                for work in works:
                    work.wait()

            return wait

        return send

    def _by_messages(self, x: Tensor) -> bool:
        if self.messages is not None:
            return self.messages
        return x.device.type == "cpu" and not self.group.keeps_order

    def _others(self) -> list[int]:
        """The other members, the next one first, so that no two ranks send to the same one at a time."""
        return [(self.group.index + step) % self.group.size for step in range(1, self.group.size)]


def falling_chunks(rows: int, count: int) -> list[slice]:
    """Rows cut into `count` chunks (no more than rows) of falling sizes, such as 40, 30, 20 and 10 %."""
    count = min(count, rows)
    whole = count * (count + 1) // 2
    borders = [0]
    for i in range(count):
        least_left = count - 1 - i  # Every later chunk has a row at least.
        falling = rows - rows * (least_left * (least_left + 1) // 2) // whole
        borders.append(max(borders[-1] + 1, min(falling, rows - least_left)))
    return [slice(*pair) for pair in itertools.pairwise(borders)]


def rising_chunks(rows: int, count: int) -> list[slice]:
    """`falling_chunks` the other way round."""
    return [slice(rows - chunk.stop, rows - chunk.start) for chunk in reversed(falling_chunks(rows, count))]


def _product_into(out_TO: Tensor, x_TI: Tensor, matrix_IO: Tensor, bias_O: Tensor | None) -> None:
    if bias_O is not None:
        torch.addmm(bias_O, x_TI, matrix_IO, out=out_TO)
    elif x_TI.device.type == "cpu" and x_TI.dtype == torch.float32:
        out_TO.copy_(project(x_TI, matrix_IO))  # Its library is the faster one, but cannot write into a given tensor.
    else:
        torch.mm(x_TI, matrix_IO, out=out_TO)
