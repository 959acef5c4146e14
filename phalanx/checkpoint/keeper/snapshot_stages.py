"""The stages of a snapshot after it was copied: examined, replicated to a peer host, made durable."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from phalanx.checkpoint.format.shard_plan import JobPlan, Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper.snapshot_verifier import ExamineJob, Examiner, Rhythm
from phalanx.checkpoint.keeper_contract import (
    Destination,
    Endpoint,
    PersistOutcome,
    PersistTask,
    Replicated,
    SnapshotProgress,
    Taken,
)
from phalanx.checkpoint.snapshot_slots import Cell, Pin, SnapshotMemory

if TYPE_CHECKING:
    from phalanx.checkpoint.persist.persister_process import PersisterProcess
    from phalanx.checkpoint.replicas.replica_service import ReplicaService


@dataclass(frozen=True)
class KeeperServices:
    """What others do for the keeper; each is made when it is first needed, because of what it imports.

    Attributes:
        make_replicas: is given the memory, and what to call with the outcome of each transfer (from any thread).
        give_way: called in each thread that examines snapshots before its first one: training is under way.
    """

    make_replicas: Callable[[SnapshotMemory, Callable[[Replicated], None]], ReplicaService]
    make_persister: Callable[[], PersisterProcess]
    give_way: Callable[[], None] = lambda: None


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
    """A shard on its way to durable storage; `is_reported`: its rank knows that the whole checkpoint is there."""

    task: PersistTask
    pin: Pin | None
    begun_s: float
    written: PersistOutcome | None = None
    is_reported: bool = False


class SnapshotStages:
    """Takes every snapshot through its stages; all of it in the keeper's loop.

    Args:
        post: has an action done in the loop; called from threads.
        ranks_of: the ranks of an attempt that are connected now.
        report: to a rank of an attempt, if it is there.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        examiner: Examiner,
        services: KeeperServices,
        post: Callable[[Callable[[], None]], None],
        ranks_of: Callable[[int], list[int]],
        report: Callable[[int, int, SnapshotProgress], None],
    ) -> None:
        self._memory, self._examiner, self._services = memory, examiner, services
        self._post, self._ranks_of, self._report = post, ranks_of, report
        self._made_replicas: ReplicaService | None = None
        self._made_persister: PersisterProcess | None = None
        self._examining: set[Key] = set()
        self._sending: defaultdict[tuple[int, int], deque[Snapshot]] = defaultdict(deque)
        self._persisting: defaultdict[int, deque[_Persisting]] = defaultdict(deque)
        self._rhythms: defaultdict[int, Rhythm] = defaultdict(Rhythm)
        self._waiting: list[tuple[set[Key], Callable[[], None]]] = []

    @property
    def replicas(self) -> ReplicaService:
        """Copies from and to other hosts."""
        if self._made_replicas is None:
            self._made_replicas = self._services.make_replicas(
                self._memory, lambda outcome: self._post(lambda: self._on_replicated(outcome))
            )
        return self._made_replicas

    @property
    def persister(self) -> PersisterProcess:
        """Writes durable checkpoints."""
        if self._made_persister is None:
            self._made_persister = self._services.make_persister()
        return self._made_persister

    @property
    def persister_descriptor(self) -> int:
        """Readable when `read_persister` is to be called; -1: never."""
        return -1 if self._made_persister is None else self._made_persister.fileno()

    def close(self) -> None:
        """End the persister and hang up on other hosts."""
        if self._made_persister is not None:
            self._made_persister.close()
        if self._made_replicas is not None:
            self._made_replicas.close()

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
        self._examining.add(Key(snapshot.id, snapshot.plan.rank))

        def done(record: Record | None, problem: str, seconds: float) -> None:
            self._post(lambda: self._on_examined(snapshot, record, problem, seconds))

        taken = snapshot.taken
        budget_s = self._rhythms[snapshot.plan.rank].budget_s(time.monotonic(), persist=taken.persist)
        job = ExamineJob(cell, snapshot.plan, snapshot.id, snapshot.shards, taken, budget_s, done)
        self._examiner.submit(job)

    def when_examined(self, action: Callable[[], None]) -> None:
        """Call `action` once all that has been copied by now is committed, which is to be soon."""
        if not self._examining:
            action()
            return
        self._examiner.hurry()
        self._waiting.append((set(self._examining), action))

    def _on_examined(self, snapshot: Snapshot, record: Record | None, problem: str, seconds: float) -> None:
        rank, step, length = snapshot.plan.rank, snapshot.id.step, snapshot.plan.data_bytes
        committed = SnapshotProgress(step, "committed", problem, "", seconds, length)
        self._report(rank, snapshot.id.attempt, committed)
        if record is not None and snapshot.peer is not None:
            self._sending[rank, step].append(snapshot)
            self.replicas.send(snapshot.plan, snapshot.id, snapshot.peer)
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

    def _on_replicated(self, outcome: Replicated) -> None:
        queue = self._sending.get((outcome.rank, outcome.step))
        if not queue:
            return
        snapshot = queue.popleft()
        if not queue:
            del self._sending[outcome.rank, outcome.step]
        about = (outcome.problem, "", outcome.seconds, outcome.bytes, outcome.to)
        self._report(outcome.rank, snapshot.id.attempt, SnapshotProgress(outcome.step, "replicated", *about))

    def _persist(self, snapshot: Snapshot, record: Record | None, problem: str) -> None:
        rank, step = snapshot.plan.rank, snapshot.id.step
        if snapshot.destination is None:
            problem = problem or f"step {step} of rank {rank} has no durable storage to go to"
        if record is None or snapshot.destination is None:
            self._report(rank, snapshot.id.attempt, SnapshotProgress(step, "durable", problem))
            return
        pin = self._memory.acquire(snapshot.id, rank)
        hurry = snapshot.taken.hurry
        task = PersistTask(snapshot.plan, record, pin.descriptor, snapshot.destination, snapshot.job, hurry)
        queue = self._persisting[rank]
        queue.append(_Persisting(task, pin, time.monotonic()))
        if len(queue) == 1:  # else one of an earlier attempt has to come to its end first
            self.persister.submit(task)

    def read_persister(self) -> None:
        """Take in what the persister reports."""
        for outcome in self.persister.outcomes():
            queue = self._persisting.get(outcome.rank)
            if not queue or queue[0].task.record.step != outcome.step:
                continue
            first = queue[0]
            if first.pin is not None:
                self._memory.unpin(first.pin)
                first.pin = None
            if not outcome.published:
                first.written = outcome
                continue
            queue.popleft()
            self._rhythms[outcome.rank].persist_s = time.monotonic() - first.begun_s
            if queue:
                self.persister.submit(queue[0].task)
            else:
                del self._persisting[outcome.rank]
            if not first.is_reported:  # else by the first rank of this host that knew
                self._report_published(first, outcome)

    def _report_published(self, ended: _Persisting, outcome: PersistOutcome) -> None:
        attempt = ended.task.record.attempt
        self._report(outcome.rank, attempt, _durable(outcome, ended.written))
        if outcome.problem:
            return
        for rank in self._ranks_of(attempt):
            if rank == outcome.rank:
                continue
            queue = self._persisting.get(rank)
            # Never one that waits: a snapshot of the same step may have been taken again, and gets a report of its own.
            own = queue[0] if queue and queue[0].task.record.snapshot[:2] == (outcome.step, attempt) else None
            if own is not None:
                own.is_reported = True
            self._report(rank, attempt, _durable(outcome, own.written if own is not None else None))


def _durable(outcome: PersistOutcome, written: PersistOutcome | None) -> SnapshotProgress:
    seconds, length = (written.seconds, written.bytes) if written else (0.0, 0)
    return SnapshotProgress(outcome.step, "durable", outcome.problem, outcome.name, seconds, length)
