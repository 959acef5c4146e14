"""Matrix products beside the collectives they need: the interface, and the plain back end.

Sequence parallelism (arXiv 2205.05198) leaves two pairs in a layer and their mirrors in backward: an all-gather whose
result is multiplied, and a product whose result is reduce-scattered. A back end decides how the two of a pair run
against each other; what is computed is the same.

========= ===================== ====================================================================================
back end  file                  what it does
========= ===================== ====================================================================================
none      overlap.py            one after the other; also what a group of one runs, without copies
chunked   chunked.py            both cut into chunks of token rows that are pipelined, on any device
fused     fused.py              torch's fused operators over symmetric memory, on GPUs that reach each other's memory
tiles     tiles.py              the same by Triton kernels of ours that wait for rows, and send, tile by tile
========= ===================== ====================================================================================

Shapes: T tokens of the sequences, n ranks, R = T / n rows of this rank, I inputs, O outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

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
        """One that is here."""
        return Pending(lambda: value)

    def wait(self) -> Tensor:
        """The tensor; waits at the first call."""
        if self._finish is not None:
            self._value, self._finish = self._finish(), None
        assert self._value is not None
        return self._value


class Overlap(Protocol):
    """How collectives run against matrix products. All members of the group make the same calls in the same order.

    Matrices are (I, O), in any layout of memory; rows are contiguous. Nothing is differentiated here.
    """

    @property
    def group(self) -> Group:
        """The ranks that split the matrices."""
        ...

    def gather(self, x_RI: Tensor) -> Pending:
        """Start to gather rows that are needed later: (R, I) -> (T, I)."""
        ...

    def gather_products(
        self, x_RI: Tensor, matrices_IO: Sequence[Tensor], biases_O: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """The gathered rows (T, I) and their product with each matrix (T, O), plus its bias."""
        ...

    def products_scatter(self, inputs_TI: Sequence[Tensor], matrices_IO: Sequence[Tensor]) -> Pending:
        """The sum over ranks of ``sum(x @ m)`` at the rows of this rank, (R, O); the products are made at once."""
        ...


class PlainOverlap:
    """One after the other, each waited for; `group` may be a group of one."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def gather(self, x_RI: Tensor) -> Pending:
        """See `Overlap.gather`."""
        return Pending.done(gather_rows(self.group, x_RI))

    def gather_products(
        self, x_RI: Tensor, matrices_IO: Sequence[Tensor], biases_O: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor]]:
        """See `Overlap.gather_products`."""
        x = gather_rows(self.group, x_RI)
        return x, [product(x, m, bias) for m, bias in zip(matrices_IO, biases_O, strict=True)]

    def products_scatter(self, inputs_TI: Sequence[Tensor], matrices_IO: Sequence[Tensor]) -> Pending:
        """See `Overlap.products_scatter`."""
        return Pending.done(scatter_rows(self.group, sum_of_products(inputs_TI, matrices_IO)))


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


def product(x_TI: Tensor, matrix_IO: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x @ matrix + bias``."""
    return project(x_TI, matrix_IO) if bias_O is None else torch.addmm(bias_O, x_TI, matrix_IO)


def sum_of_products(inputs_TI: Sequence[Tensor], matrices_IO: Sequence[Tensor]) -> Tensor:
    """``sum(x @ m)``, each added by the product that makes it."""
    out: Tensor | None = None
    for x, matrix in zip(inputs_TI, matrices_IO, strict=True):
        out = project(x, matrix, out)
    assert out is not None
    return out
