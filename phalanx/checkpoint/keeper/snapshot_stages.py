"""The stages of a snapshot after it was copied: examined, replicated to a peer host, made durable."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from phalanx.checkpoint.format.shard_plan import JobPlan, Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper.snapshot_slots import Cell, MemoryVault, Pin
from phalanx.checkpoint.keeper.snapshot_verifier import ExamineJob, Examiner, Rhythm
from phalanx.checkpoint.keeper_contract import (
    Destination,
    Endpoint,
    Persister,
    PersistOutcome,
    PersistTask,
    Replicated,
    SnapshotProgress,
    Taken,
)


class Replicas(Protocol):
    """What `phalanx.checkpoint.replicas.replica_service.ReplicaService` does; each ends in a `Replicated`."""

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
        """See `phalanx.checkpoint.keeper_contract.Persister`."""
        self._persister.prepare()

    def submit(self, task: PersistTask) -> None:
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

    def outcomes(self) -> list[PersistOutcome]:
        """See `Persister`."""
        return [] if self._made is None else self._made.outcomes()

    def close(self) -> None:
        """See `Persister`."""
        if self._made is not None:
            self._made.close()


class Ranks(Protocol):
    """The ranks of this host that are connected now."""

    def of(self, attempt: int) -> list[int]:
        """Those of an attempt."""
        ...

    def tell(self, rank: int, attempt: int, progress: SnapshotProgress) -> None:
        """Tell a rank, if it is there."""
        ...


class Key(NamedTuple):
    """One shard of a snapshot."""

    snapshot: SnapshotId
    rank: int


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of one shard on its way, and all that is needed for it when its rank is gone."""

    id: SnapshotId
    plan: ShardPlan
    shards: int
    taken: Taken
    job: JobPlan | None
    destination: Destination | None
    peer: Endpoint | None


@dataclass
class _Persisting:
    """A shard on its way to durable storage; `is_told`: its rank has heard that the whole checkpoint is there."""

    task: PersistTask
    pin: Pin | None
    begun_s: float
    written: PersistOutcome | None = None
    is_told: bool = False


@dataclass
class SnapshotStages:
    """Takes every snapshot through its stages; all of it in the keeper's loop, which `post` reaches from threads."""

    vault: MemoryVault
    examiner: Examiner
    replicas: Replicas
    persister: Persister
    post: Callable[[Callable[[], None]], None]
    ranks: Ranks
    _examining: set[Key] = field(default_factory=set)
    _sending: defaultdict[tuple[int, int], deque[Snapshot]] = field(default_factory=lambda: defaultdict(deque))
    _persisting: defaultdict[int, deque[_Persisting]] = field(default_factory=lambda: defaultdict(deque))
    _rhythms: defaultdict[int, Rhythm] = field(default_factory=lambda: defaultdict(Rhythm))
    _waiting: list[tuple[set[Key], Callable[[], None]]] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return not (self._examining or self._sending or self._persisting)

    @property
    def is_persisting(self) -> bool:
        """Whether something is on its way to durable storage."""
        return bool(self._persisting)

    def begin(self, snapshot: Snapshot, cell: Cell) -> None:
        """`cell` holds a snapshot."""
        rank = snapshot.plan.rank
        self._examining.add(Key(snapshot.id, rank))

        def done(record: Record | None, problem: str, seconds: float) -> None:
            self.post(lambda: self._examined(snapshot, record, problem, seconds))

        budget = self._rhythms[rank].beat(time.monotonic(), persist=snapshot.taken.persist)
        self.examiner.submit(
            ExamineJob(cell, snapshot.plan, snapshot.id, snapshot.shards, snapshot.taken, budget, done)
        )

    def when_examined(self, action: Callable[[], None]) -> None:
        """Call `action` once all that has been copied by now is committed, which is to be soon."""
        if not self._examining:
            action()
            return
        self.examiner.hurry()
        self._waiting.append((set(self._examining), action))

    def replicated(self, told: Replicated) -> None:
        """What became of a snapshot that was to be sent."""
        queue = self._sending.get((told.rank, told.step))
        if not queue:
            return
        snapshot = queue.popleft()
        if not queue:
            del self._sending[told.rank, told.step]
        progress = SnapshotProgress(told.step, "replicated", told.problem, "", told.seconds, told.bytes, told.to)
        self.ranks.tell(told.rank, snapshot.id.attempt, progress)

    def persisted(self) -> None:
        """The persister has something to say."""
        for outcome in self.persister.outcomes():
            self._persisted(outcome)

    def _examined(self, snapshot: Snapshot, record: Record | None, problem: str, seconds: float) -> None:
        rank, length = snapshot.plan.rank, snapshot.plan.data_bytes
        self.ranks.tell(
            rank, snapshot.id.attempt, SnapshotProgress(snapshot.id.step, "committed", problem, "", seconds, length)
        )
        if record is not None:
            self._send(snapshot)
        if snapshot.taken.persist:
            self._persist(snapshot, record, problem)
        key = Key(snapshot.id, rank)
        self._examining.discard(key)
        for waits_for, _ in self._waiting:
            waits_for.discard(key)
        ready = [action for waits_for, action in self._waiting if not waits_for]
        self._waiting = [(waits_for, action) for waits_for, action in self._waiting if waits_for]
        for action in ready:
            action()

    def _send(self, snapshot: Snapshot) -> None:
        if snapshot.peer is not None:
            self._sending[snapshot.plan.rank, snapshot.id.step].append(snapshot)
            self.replicas.send(snapshot.plan, snapshot.id, snapshot.peer)

    def _persist(self, snapshot: Snapshot, record: Record | None, problem: str) -> None:
        rank, step = snapshot.plan.rank, snapshot.id.step
        if snapshot.destination is None:
            problem = problem or f"step {step} of rank {rank} has no durable storage to go to"
        if record is None or snapshot.destination is None:
            self.ranks.tell(rank, snapshot.id.attempt, SnapshotProgress(step, "durable", problem))
            return
        pin = self.vault.acquire(snapshot.id, rank)
        task = PersistTask(
            snapshot.plan, record, pin.descriptor, snapshot.destination, snapshot.job, snapshot.taken.hurry
        )
        queue = self._persisting[rank]
        queue.append(_Persisting(task, pin, time.monotonic()))
        if len(queue) == 1:  # else one of an earlier attempt has to come to its end first
            self.persister.submit(task)

    def _persisted(self, outcome: PersistOutcome) -> None:
        queue = self._persisting.get(outcome.rank)
        if not queue or queue[0].task.record.step != outcome.step:
            return
        first = queue[0]
        if first.pin is not None:
            self.vault.unpin(first.pin)
            first.pin = None
        if not outcome.published:
            first.written = outcome
            return
        queue.popleft()
        self._rhythms[outcome.rank].persisted(time.monotonic() - first.begun_s)
        if queue:
            self.persister.submit(queue[0].task)
        else:
            del self._persisting[outcome.rank]
        self._ended(first, outcome)

    def _ended(self, ended: _Persisting, outcome: PersistOutcome) -> None:
        if ended.is_told:
            return  # by the first rank of this host that knew
        attempt = ended.task.record.attempt
        self.ranks.tell(outcome.rank, attempt, _durable(outcome, ended.written))
        if not outcome.problem:
            self._tell_others(outcome, attempt)

    def _tell_others(self, outcome: PersistOutcome, attempt: int) -> None:
        for rank in self.ranks.of(attempt):
            if rank == outcome.rank:
                continue
            queue = self._persisting.get(rank)
            # Never one that waits: a snapshot of the same step may have been taken again, and is to be told of itself.
            own = queue[0] if queue and queue[0].task.record.snapshot[:2] == (outcome.step, attempt) else None
            if own is not None:
                own.is_told = True
            self.ranks.tell(rank, attempt, _durable(outcome, own.written if own is not None else None))


def _durable(outcome: PersistOutcome, written: PersistOutcome | None) -> SnapshotProgress:
    seconds, length = (written.seconds, written.bytes) if written else (0.0, 0)
    return SnapshotProgress(outcome.step, "durable", outcome.problem, outcome.name, seconds, length)
