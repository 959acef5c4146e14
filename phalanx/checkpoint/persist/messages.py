"""What keeper and persister process say to each other, and memory for what is longer than a packet. Torch-free."""

from __future__ import annotations

import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from phalanx.checkpoint.format.record import Record
from phalanx.checkpoint.persist.contract import Destination, Outcome
from phalanx.checkpoint.persist.parts import Writing

T = TypeVar("T")
_KEPT = 64  # plans; a host has one per rank


@dataclass(frozen=True)
class Submit:
    """A task. Descriptors beside it: the slot, `Errand.submitted`, the plan and, where there is one, the job's plan.

    Attributes:
        plan, job: numbers of the plans, so that each is read once; job 0 is none.
        hurry: as in `Task`.
    """

    plan: int
    job: int
    hurry: bool


@dataclass(frozen=True)
class Abandon:
    """A process that was to write a shard or publish has died: tell the others, and clear up. Descriptor: `Errand`."""


TO_PERSISTER = {"Submit": Submit, "Abandon": Abandon}
TO_KEEPER = {"Outcome": Outcome}


@dataclass(frozen=True)
class Errand:
    """What differs from task to task, and is too long for a packet.

    Attributes:
        destination: where to write.
        record: of the slot; of an `Abandon`, with no sums.
        problem: of an `Abandon`, what happened.
    """

    destination: Destination
    record: Record
    problem: str = ""

    @property
    def writing(self) -> Writing:
        """Which checkpoint it is about."""
        return Writing(*self.record.snapshot, self.destination.nonce)

    def to_bytes(self) -> bytes:
        """For `from_bytes`."""
        return json.dumps([asdict(self.destination), self.record.to_text(), self.problem]).encode()

    @staticmethod
    def from_bytes(content: bytes) -> Errand:
        """The reverse of `to_bytes`."""
        destination, record, problem = json.loads(content)
        return Errand(Destination(**destination), Record.from_text(record), problem)


def in_memory(content: bytes) -> int:
    """The descriptor of new memory that holds `content`."""
    descriptor = os.memfd_create("phalanx")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    return descriptor


def read_memory(descriptor: int) -> bytes:
    """All that memory holds."""
    with open(os.dup(descriptor), "rb") as file:  # noqa: PTH123
        file.seek(0)
        return file.read()


class Shelf:
    """Plans in memory, each written once, numbered from 1. What has not been asked for for long is let go."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._places: OrderedDict[int, tuple[Any, int, int]] = OrderedDict()

    def put(self, plan: Any) -> tuple[int, int]:
        """The number of a plan, which has a method `to_bytes`, and the descriptor of its memory."""
        known = self._places.get(id(plan))
        if known is None:
            known = (plan, next(self._numbers), in_memory(plan.to_bytes()))
            self._places[id(plan)] = known  # it holds the plan, so its id stays its own
        self._places.move_to_end(id(plan))
        if len(self._places) > _KEPT:
            os.close(self._places.popitem(last=False)[1][2])
        return known[1:]

    def close(self) -> None:
        """Let go of all memory."""
        for _, _, descriptor in self._places.values():
            os.close(descriptor)
        self._places.clear()


class Known(Generic[T]):
    """The other side's: what was read, by its number."""

    def __init__(self, parse: Callable[[bytes], T]) -> None:
        self._parse = parse
        self._values: OrderedDict[int, T] = OrderedDict()

    def get(self, number: int, descriptor: int) -> T:
        """What has this number, read from memory if it is new."""
        if number not in self._values:
            self._values[number] = self._parse(read_memory(descriptor))
        self._values.move_to_end(number)
        if len(self._values) > _KEPT:
            self._values.popitem(last=False)
        return self._values[number]
