"""What any place to restore from offers, what came of reading it, and what a restore has to tell in the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from phalanx.checkpoint.format.shard_plan import Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper_contract import Endpoint
from phalanx.checkpoint.restoring.fit import Differences, Part, SavedBlocks
from phalanx.core import units

Kind = Literal["memory", "peer", "durable"]


class Rate(NamedTuple):
    """What came over one network interface of another host, or from one other place.

    Attributes:
        place: ``this host``, ``durable``, or a host and its interface.
        bytes: by all ranks together.
        seconds: of the rank that took longest.
        possible_bytes_per_s: of the interface; None where it is not known.
    """

    kind: Kind
    place: str
    bytes: int
    seconds: float
    possible_bytes_per_s: float | None = None

    @property
    def share(self) -> float | None:
        """Of the possible rate; None where that is not known."""
        if not self.possible_bytes_per_s or self.seconds <= 0:
            return None
        return self.bytes / self.seconds / self.possible_bytes_per_s

    def __str__(self) -> str:
        """``eth0 of host b: 1.20 GiB at 1.35 GB/s, 54 % of what is possible``."""
        rate = f" at {self.bytes / self.seconds / 1e9:.2f} GB/s" if self.seconds > 0 else ""
        share = "" if self.share is None else f", {self.share:.0%} of what is possible"
        return f"{self.place}: {units.size(self.bytes)}{rate}{share}"


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
    """What came of reading, on one rank.

    Attributes:
        faults: if there are any, what was read holds anything.
        rates: by place.
        notes: a line for each damage that nothing has to be refused for.
    """

    faults: list[Fault] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def extend(self, other: Reading) -> None:
        """And what came of reading that."""
        self.faults += other.faults
        self.notes += other.notes
        for rate in other.rates:
            self.add(rate)

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
    def config(self) -> Mapping[str, Any]:
        """The resolved config of the run that kept it; empty where that is not known."""
        ...

    @property
    def tensors(self) -> Mapping[str, SavedBlocks]:
        """What it holds."""
        ...

    def distance(self, rank: int, holder: int) -> int:
        """How far a holder is from a rank: 0 is memory of its host."""
        ...

    def check(self) -> Reading:
        """Check this rank's share of what cannot be checked while it is read."""
        ...

    def check_beside(self) -> Reading:
        """Check this rank's share of what nothing is restored from; what is wrong there is only noted."""
        ...

    def verify(self) -> Reading:
        """Read and check this rank's share of all bytes, and keep none."""
        ...

    def read(self, wanted: Sequence[Part]) -> Reading:
        """Fill the targets of `wanted`; if there are faults, some of them hold anything."""
        ...


class RemoteCopy(Protocol):
    """A committed copy that another host holds."""

    @property
    def record(self) -> Record:
        """Its record."""
        ...

    @property
    def plan(self) -> ShardPlan:
        """Its plan."""
        ...

    def chunks(self, numbers: Sequence[int]) -> Iterator[memoryview]:
        """The chunks (of `CHUNK_BYTES`) of these numbers, in order, as they come; each holds until the next is taken.

        Raises:
            OSError: the connection is lost.
        """
        ...


class RemoteCopies(Protocol):
    """Reads what the keepers of other hosts hold."""

    def open(self, host: Endpoint, snapshot: SnapshotId, rank: int) -> AbstractContextManager[RemoteCopy]:
        """A copy on `host`; may be called from several threads.

        Raises:
            LookupError: it is not there any more. OSError: the host cannot be reached.
        """
        ...


@dataclass(frozen=True)
class Restored:
    """A state that was taken back; the same on all ranks, but for `differences.missing`.

    Attributes:
        step, attempt: of the state.
        state: what training had given besides tensors.
        source: ``memory`` where all came from keepers of the ranks' own hosts, ``peer`` where some came from another
            host's, ``durable`` where it came from durable storage.
        name: of the durable checkpoint; empty where it came from memory.
        seconds: in all, with looking and refusals.
        bytes_by_kind: what all ranks together took from each kind of source; with reading whole runs or archives,
            and nothing twice that was given on within a group.
        rates: by place.
        refusals: one line for each copy or checkpoint that was refused.
        differences: names on one side only.
    """

    step: int
    attempt: int
    state: Any
    source: Kind
    name: str = ""
    seconds: float = 0.0
    bytes_by_kind: Mapping[Kind, int] = field(default_factory=dict)
    rates: tuple[Rate, ...] = ()
    refusals: tuple[str, ...] = ()
    differences: Differences = field(default_factory=Differences)

    @property
    def only_in_memory(self) -> bool:
        """Whether it lies in the memory of hosts, and perhaps nowhere else."""
        return self.source != "durable"


def together(rates: Iterable[Rate]) -> tuple[Rate, ...]:
    """The rates of all ranks, by place."""
    found: dict[tuple[Kind, str], Rate] = {}
    for rate in rates:
        known = found.get((rate.kind, rate.place))
        if known is not None:
            rate = rate._replace(bytes=rate.bytes + known.bytes, seconds=max(rate.seconds, known.seconds))
        found[rate.kind, rate.place] = rate
    return tuple(found[key] for key in sorted(found))
