"""The other ranks of a job, as code sees them that is not about layouts: small values exchanged, nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Peers(Protocol):
    """Every rank calls the same methods in the same order. Values are what JSON can hold."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def size(self) -> int:
        """Ranks in all."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in order of rank, on every rank."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank; what others give is ignored."""
        ...

    def barrier(self) -> None:
        """Wait until every rank is here."""
        ...

    def ask_highest(self, value: int) -> Callable[[], int]:
        """Begin to ask all ranks for a number; what is returned waits for the highest of them."""
        ...


class Alone:
    """The only rank of a job."""

    rank = 0
    size = 1

    def gather(self, value: Any) -> list[Any]:
        """Its own value."""
        return [value]

    def broadcast(self, value: Any) -> Any:
        """Its own value."""
        return value

    def barrier(self) -> None:
        """Nobody to wait for."""

    def ask_highest(self, value: int) -> Callable[[], int]:
        """Its own number."""
        return lambda: value


ALONE = Alone()
"""For the default of a parameter."""
