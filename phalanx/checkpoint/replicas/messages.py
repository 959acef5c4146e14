"""What keepers of different hosts tell each other. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Message:
    """Of the classes below."""


@dataclass(frozen=True)
class Welcome(Message):
    """Listener: you are let in; `host`: who says so."""

    host: str


@dataclass(frozen=True)
class Refused(Message):
    """Listener: no. `later_attempt`: because it has seen a later attempt than the caller's."""

    why: str
    later_attempt: bool = False


@dataclass(frozen=True)
class Offer(Message):
    """Caller: take a replica; `Record.to_text`."""

    record: str


@dataclass(frozen=True)
class PlanNeeded(Message):
    """Listener: I do not know the plan of that record."""


@dataclass(frozen=True)
class Plan(Message):
    """`ShardPlan.to_bytes`."""

    text: str


@dataclass(frozen=True)
class Go(Message):
    """Listener: there is memory for it; send the elements."""


@dataclass(frozen=True)
class Stored(Message):
    """Listener: they are there, whole and checked, and committed."""


@dataclass(frozen=True)
class List(Message):
    """Caller: what do you hold?"""


@dataclass(frozen=True)
class Holdings(Message):
    """Listener: pairs of `Record.to_text` and whether it is a replica."""

    held: list[tuple[str, bool]]


@dataclass(frozen=True)
class Want(Message):
    """Caller: give me runs of chunks (the first, how many) of a shard, and its plan where it is asked for."""

    step: int
    attempt: int
    set_id: str
    rank: int
    runs: list[tuple[int, int]]
    plan: bool


@dataclass(frozen=True)
class Given(Message):
    """Listener: here is its record, perhaps its plan, and then the bytes of the runs."""

    record: str
    plan: str


@dataclass(frozen=True)
class Missing(Message):
    """Listener: that copy is not here, or not any more."""

    why: str


KINDS: Mapping[str, type[Message]] = MappingProxyType({kind.__name__: kind for kind in Message.__subclasses__()})
"""Classes by their names."""
