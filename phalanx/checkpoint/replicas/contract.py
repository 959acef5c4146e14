"""What the keeper and its threads that talk to other hosts promise each other. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from phalanx.checkpoint.format.plan import ShardPlan
from phalanx.checkpoint.format.record import Record, SnapshotId


class RefusedError(RuntimeError):
    """A later attempt has been seen: this process is a leftover of an earlier one, and must not write."""


class NotBegunError(RuntimeError):
    """An attempt of which no rank of this host has told: it may come yet, or somebody has made it up."""


@dataclass(frozen=True)
class Endpoint:
    """Where the keeper of a host can be reached by those of other hosts.

    Attributes:
        host: name of the host (or of what plays one).
        addresses: of its network interfaces, the one to be used first.
        port: TCP; 0 where it does not listen.
        interface: name of the interface that was chosen, and its speed where it is known.
        interface_bits_per_s: None: unknown.
    """

    host: str
    addresses: tuple[str, ...]
    port: int
    interface: str = ""
    interface_bits_per_s: int | None = None


class Slot(NamedTuple):
    """Memory for one snapshot of a shard; ``memory[: plan.data_bytes]`` is to be written."""

    number: int
    memory: memoryview


class Held(NamedTuple):
    """A committed copy that a keeper has."""

    record: Record
    is_replica: bool


class Vault(Protocol):
    """The memory inside the keeper, as its own threads (replicas, persister) see it. Every method may be called from
    any thread."""

    def place(self, plan: ShardPlan, snapshot: SnapshotId) -> Slot:
        """Memory for a replica that is about to arrive; never that of the newest committed copy of the shard.

        Only ranks of this host begin attempts, whose numbers were claimed in storage: a replica cannot.

        Raises:
            RefusedError: a later attempt has begun. NotBegunError: this one has not.
            OSError: there is no memory left.
        """
        ...

    def commit(self, plan: ShardPlan, slot: Slot, record: Record) -> None:
        """The replica in `slot` is whole and checked."""
        ...

    def abandon(self, plan: ShardPlan, slot: Slot) -> None:
        """What was to come into `slot` did not."""
        ...

    def held(self) -> list[Held]:
        """Committed copies."""
        ...

    def pin(self, snapshot: SnapshotId, rank: int) -> AbstractContextManager[tuple[Record, ShardPlan, int]]:
        """A committed copy, which is not overwritten within the context, and the descriptor of its memory (read only).

        Raises:
            LookupError: it is not there any more.
        """
        ...


class ReplicaPlaces(NamedTuple):
    """Which host keeps the replica of which; by name."""

    peer_of: dict[str, str]
    warnings: Sequence[str]


@dataclass(frozen=True)
class Replicated:
    """What became of sending one snapshot of a rank to the keeper of another host.

    Attributes:
        rank, step: of the snapshot.
        to: name of the other host.
        problem: empty, or why it is not there, naming host and cause.
        refused: the other host has seen a later attempt: this process is a leftover of an earlier one.
        seconds, bytes: what it took; 0 where it failed.
        share: of the rate that the interface could reach; None where its speed is unknown.
    """

    rank: int
    step: int
    to: str
    problem: str = ""
    refused: bool = False
    seconds: float = 0.0
    bytes: int = 0
    share: float | None = None
