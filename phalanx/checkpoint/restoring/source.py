"""Any one state that can be restored, wherever it lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from phalanx.checkpoint.restoring.parts import Part, SavedTensor
from phalanx.checkpoint.restoring.restored import Rate


class Fault(NamedTuple):
    """Why something cannot be used.

    Attributes:
        host: that has the copy; empty: durable storage.
        holder: rank of the shard; -1: everything of that host or checkpoint.
    """

    host: str
    holder: int
    cause: str


@dataclass
class Reading:
    """What came of reading, on one rank."""

    faults: list[Fault] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)

    def add(self, rate: Rate) -> None:
        """Count what was read, after one another, in one place."""
        for number, known in enumerate(self.rates):
            if (known.kind, known.place) == (rate.kind, rate.place):
                added = known._replace(bytes=known.bytes + rate.bytes, seconds=known.seconds + rate.seconds)
                self.rates[number] = added
                return
        self.rates.append(rate)


class Source(Protocol):
    """A state; the same on all ranks."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def attempt(self) -> int:
        """That wrote it."""
        ...

    @property
    def name(self) -> str:
        """Of a durable checkpoint; else empty."""
        ...

    @property
    def state(self) -> Any:
        """What training had given besides tensors."""
        ...

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """What it holds."""
        ...

    def distance(self, rank: int, holder: int) -> int:
        """How far a holder is from a rank: 0 is memory of its host."""
        ...

    def check(self) -> Reading:
        """Check this rank's share of what cannot be checked while it is read."""
        ...

    def read(self, wanted: Sequence[Part]) -> Reading:
        """Fill the targets of `wanted`; if there are faults, some of them hold anything."""
        ...
