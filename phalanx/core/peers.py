"""The other ranks of a job, as code sees them that is not about layouts: small values exchanged, nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from phalanx.core.layout import Axis


class PeerError(RuntimeError):
    """Another rank has ended, has not come, or does something else; the message names it."""


class Peers(Protocol):
    """Every rank calls the same methods in the same order. Values are what JSON can hold.

    Of n ranks, `gather` brings each n values: where rank 0 alone needs them, or all need the lowest, say so.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Ranks in all."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in order of rank, on every rank."""

    def collect(self, value: Any) -> list[Any] | None:
        """The values of all ranks, in order of rank, on rank 0; None elsewhere, without a wait."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank; what others give is ignored."""

    def lowest(self, value: Any) -> Any:
        """The lowest of the values that are not None, as Python compares them, on every rank; None where all are."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def ask_highest(self, value: int) -> Callable[[], int]:
        """Begin to ask all ranks for a number; what is returned waits for the highest of them."""


class Copies(Protocol):
    """The ranks of one data-parallel group: those whose blocks are the same wherever no axis of `axes` splits them."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that the group spans."""

    @property
    def index(self) -> int:
        """This rank's place in the group."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    def broadcast(self, tensor: Any, source: int) -> None:
        """Give the contiguous `tensor` of member `source` to all, in place; every member calls this alike."""


class _Alone:
    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def collect(self, value: Any) -> list[Any] | None:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def lowest(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        pass

    def ask_highest(self, value: int) -> Callable[[], int]:
        return lambda: value


ALONE = _Alone()
"""For the default of a parameter."""
