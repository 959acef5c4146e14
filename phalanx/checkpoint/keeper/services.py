"""What the keeper has others do for it: sending and receiving replicas. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from phalanx.checkpoint.format.plan import ShardPlan
from phalanx.checkpoint.format.record import SnapshotId
from phalanx.checkpoint.persist.contract import Outcome, Persister, Task
from phalanx.checkpoint.replicas.contract import Endpoint


class Replicas(Protocol):
    """As `phalanx.checkpoint.replicas.service.ReplicaService` does it; `Replicated` is told of what became of each."""

    def use_secret(self, secret: bytes) -> None:
        """Talk to those that have this secret, and no other."""
        ...

    def start_listening(self) -> Endpoint:
        """Where other keepers reach this one; OSError: it cannot listen."""
        ...

    def send(self, plan: ShardPlan, snapshot: SnapshotId, peer: Endpoint) -> None:
        """Send a committed snapshot, in the background; what became of it is told."""
        ...

    def turn(self, rank: int, peer: Endpoint | None, attempt: int) -> None:
        """Snapshots of `rank` go to `peer` from now on, those under way too; those of other attempts nowhere."""
        ...

    def close(self) -> None:
        """Hang up on everybody."""
        ...


class LateReplicas:
    """Replicas that are made when they are first needed: most of what they import is not needed on a single host."""

    def __init__(self, make: Callable[[], Replicas]) -> None:
        self._make = make
        self._made: Replicas | None = None

    def use_secret(self, secret: bytes) -> None:
        """See `Replicas`."""
        self._service.use_secret(secret)

    def start_listening(self) -> Endpoint:
        """See `Replicas`."""
        return self._service.start_listening()

    def send(self, plan: ShardPlan, snapshot: SnapshotId, peer: Endpoint) -> None:
        """See `Replicas`."""
        self._service.send(plan, snapshot, peer)

    def turn(self, rank: int, peer: Endpoint | None, attempt: int) -> None:
        """See `Replicas`."""
        self._service.turn(rank, peer, attempt)

    def close(self) -> None:
        """See `Replicas`."""
        if self._made is not None:
            self._made.close()

    @property
    def _service(self) -> Replicas:
        if self._made is None:
            self._made = self._make()
        return self._made


class LatePersister:
    """A persister that is made when it is first needed."""

    def __init__(self, make: Callable[[], Persister]) -> None:
        self._make = make
        self._made: Persister | None = None

    def prepare(self) -> None:
        """See `phalanx.checkpoint.persist.contract.Persister`."""
        self._persister.prepare()

    def submit(self, task: Task) -> None:
        """See `Persister`."""
        self._persister.submit(task)

    @property
    def _persister(self) -> Persister:
        if self._made is None:
            self._made = self._make()
        return self._made

    def fileno(self) -> int:
        """See `Persister`."""
        return -1 if self._made is None else self._made.fileno()

    def outcomes(self) -> list[Outcome]:
        """See `Persister`."""
        return [] if self._made is None else self._made.outcomes()

    def close(self) -> None:
        """See `Persister`."""
        if self._made is not None:
            self._made.close()
