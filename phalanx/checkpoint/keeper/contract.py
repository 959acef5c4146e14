"""What ranks, the keeper of their host, and what works inside it promise each other. Torch-free.

A rank leases memory for its shard: some slots, each large enough for one snapshot of it. It copies a snapshot into a
slot that is free and says so (`Keeper.taken`). The keeper then, in the background: sums and examines it and writes the
record that commits it; sends it to the peer host; hands it to the persister. A slot is free unless it holds the newest
committed copy of the shard, is not committed yet, or is being replicated or persisted.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from phalanx.checkpoint.format.plan import JobPlan, ShardPlan
from phalanx.checkpoint.format.record import Record, SnapshotId
from phalanx.checkpoint.persist.contract import Destination
from phalanx.checkpoint.replicas.contract import Endpoint, Held, Slot

Stage = Literal["committed", "replicated", "durable"]


class KeeperLostError(RuntimeError):
    """The keeper is gone or cannot be reached; what it kept is lost, training need not be."""


@dataclass(frozen=True)
class Taken:
    """A snapshot that has been copied into a slot.

    Attributes:
        step: optimizer steps done.
        state: JSON text, of rank 0; empty on others.
        stepped: as in `Record`.
        persist: whether it shall become a durable checkpoint; the same on all ranks.
        hurry: examine and persist it as fast as possible instead of sparing the cores: training waits for it.
        metrics: as in `Record`.
        unix_ns: when.
    """

    step: int
    state: str = ""
    stepped: bool = True
    persist: bool = False
    hurry: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    unix_ns: int = 0


@dataclass(frozen=True)
class Progress:
    """A snapshot of this rank has come to a stage, or will not.

    Attributes:
        stage: which; ``durable`` is told to every rank when the whole checkpoint is published.
        problem: empty, or why it failed, naming file and cause. A checkpoint that is stale or sick and therefore
            quarantined is a problem at the stage ``durable``.
        name: of the durable checkpoint.
        seconds, bytes: what it took this host: examining, sending, writing.
        to: the peer host that has the replica.
    """

    step: int
    stage: Stage
    problem: str = ""
    name: str = ""
    seconds: float = 0.0
    bytes: int = 0
    to: str = ""


class Keeper(Protocol):
    """A rank's connection to the keeper of its host. Its methods do not wait unless they say so.

    Raises:
        KeeperLostError: from any method, once it is gone. RefusedError: a later attempt has been seen.
    """

    @property
    def last_attempt(self) -> int:
        """The highest attempt that the keeper had seen before this connection."""
        ...

    def held(self) -> list[Held]:
        """Committed copies of shards, own and replicas, of any rank; waits for the answer."""
        ...

    def read(self, snapshot: SnapshotId, rank: int) -> AbstractContextManager[tuple[Record, ShardPlan, memoryview]]:
        """A committed copy, to be read within the context and checked against its sums; waits until it is handed over.

        Raises:
            LookupError: it is not there any more.
        """
        ...

    def begin(self, attempt: int, set_id: str, shards: int) -> None:
        """This connection belongs to `attempt`, and its shards to the set; lower attempts are refused from now on."""
        ...

    def resume_from(self, snapshot: SnapshotId) -> None:
        """Training goes on from `snapshot`, of an earlier attempt; to be called after `begin`, before the first `slot`.

        Later copies of earlier attempts, which were not whole, are void; else they would count as the newest, and the
        only whole snapshot would be written over first. Waits for the answer.
        """
        ...

    def lease(self, plan: ShardPlan, job: JobPlan | None, slots: int, destination: Destination | None) -> None:
        """Ask for memory; it is allocated, and touched here and there, in the background (see `ready`).

        Memory of an earlier lease of the same rank and size is taken over, with what is committed in it. If it cannot
        be had, `poll` returns a problem at stage ``committed`` of step -1.

        Args:
            job: rank 0's; its host publishes.
            destination: None where nothing is ever made durable.
        """
        ...

    def replicate_to(self, peer: Endpoint | None, attempt: int, secret: bytes) -> None:
        """Send every committed snapshot of this rank to the keeper at `peer`; talk to those with `secret`, no others.

        What an earlier attempt than `attempt` wanted to send is given up.
        """
        ...

    @property
    def endpoint(self) -> Endpoint:
        """Where other keepers reach this one; it begins to listen when first asked; waits for the answer."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the memory of the lease is there and can be written without page faults."""
        ...

    @property
    def busy(self) -> bool:
        """Whether the next snapshot cannot be taken yet: no memory, no free slot, or the last one is not committed, and
        replicated where that is asked for."""
        ...

    @property
    def persisting(self) -> bool:
        """Whether a snapshot of this rank is on its way to durable storage."""
        ...

    def slot(self) -> Slot:
        """A slot to write the next snapshot into; only while not `busy`."""
        ...

    def taken(self, slot: Slot, taken: Taken) -> None:
        """`slot` holds a snapshot now."""
        ...

    def poll(self) -> list[Progress]:
        """What has happened since the last call."""
        ...

    def wait(self, step: int, stage: Stage, timeout_s: float) -> list[Progress]:
        """Wait until the snapshot of `step` has come to `stage`, or failed to; all that happened meanwhile.

        Raises:
            TimeoutError: it has not.
        """
        ...

    def finish(self) -> None:
        """The job has ended well: the keeper ends, once every rank of the host has said so."""
        ...

    def close(self) -> None:
        """Hang up; the lease ends, what is committed stays until the keeper's time to live is over."""
        ...
