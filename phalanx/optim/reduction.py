"""How an optimizer adds up over a logical matrix that may be spread over ranks.

LAMB needs the norm of a whole matrix, CAME the means of its rows and columns. Both compute partial sums of what they
hold and hand them to a `Reduction`; a sharded layout passes one that adds over its groups, so that no optimizer ever
sees a process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor


class Reduction(Protocol):
    """Complete partial sums: called once for many parameters, so that a layout can pack them into one collective."""

    def __call__(self, sums: list[Tensor], parameters: Sequence[Tensor], dim: int | None) -> list[Tensor]:
        """Return the sums over whole logical matrices.

        Args:
            sums: ``sums[i]``, of any shape, was summed over the local part of ``parameters[i]``.
            parameters: the parameters the sums belong to.
            dim: the dimension that was summed away: -1 (columns), -2 (rows) or None (every dimension).
        """
        ...


class GradientNorm(Protocol):
    """The norm of the whole gradient, also of what other ranks hold."""

    def __call__(self, parameters: Iterable[Tensor], /) -> Tensor:
        """The 2-norm of all gradients taken together, of `parameters` and of those of other ranks; a scalar."""
        ...


def local(sums: list[Tensor], parameters: Sequence[Tensor], dim: int | None) -> list[Tensor]:
    """The `Reduction` of whole matrices: what was summed here is already complete."""
    return sums
