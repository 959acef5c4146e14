"""Threads that sum and look at what has been copied into a slot, and commit it. Torch-free."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xxhash import xxh3_64

from phalanx.checkpoint.format.plan import ShardPlan
from phalanx.checkpoint.format.record import CHUNK_BYTES, Record, SnapshotId
from phalanx.checkpoint.format.sums import state_sum
from phalanx.checkpoint.keeper.contract import Taken
from phalanx.checkpoint.keeper.pace import Pace
from phalanx.checkpoint.keeper.vault import Cell, MemoryVault
from phalanx.core.points import NO_POINTS, Points

if TYPE_CHECKING:
    from phalanx.checkpoint.keeper.finite import Findings

_NICE = 10
_HURRIED_THREADS = 4  # that look at one slot while training waits for it

Rest = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """A slot to be examined and committed.

    Attributes:
        shards: how many make up the snapshot.
        budget_s: within how many seconds, unless in a hurry.
        done: called from the thread, with the record (None: it could not be made, see the text) and the seconds.
    """

    cell: Cell
    plan: ShardPlan
    snapshot: SnapshotId
    shards: int
    taken: Taken
    budget_s: float
    done: Callable[[Record | None, str, float], None]
    hurry: threading.Event = field(default_factory=threading.Event)


class Examiner:
    """Examines slots of a vault one after the other.

    Args:
        points: ``keeper.examined`` before a slot is committed, ``keeper.committed`` after.
        threads: how many slots are examined at once.
        give_way: called in each of them before its first one.
    """

    def __init__(
        self,
        vault: MemoryVault,
        points: Points = NO_POINTS,
        threads: int = 1,
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        self._vault = vault
        self._points = points
        self._give_way = give_way
        self._pace = Pace(threads)
        self._lock = threading.Lock()
        self._waiting: list[Job] = []
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"examiner-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Examine this after all before it; does not wait. If it is in a hurry, so are those before it."""
        self._pace.expect(job.plan.data_bytes)
        with self._lock:
            self._waiting.append(job)
        if job.taken.hurry:
            self.hurry()
        self._jobs.put(job)

    def hurry(self) -> None:
        """Be done with everything that has been submitted as soon as possible."""
        with self._lock:
            for job in self._waiting:
                job.hurry.set()

    def close(self) -> None:
        """Finish what has been submitted, and end."""
        self.hurry()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        from phalanx.checkpoint.keeper import finite  # noqa: F401 (numpy takes a while: here nobody waits for it)

        is_first = True
        while (job := self._jobs.get()) is not None:
            if is_first:
                self._give_way()
                is_first = False
            began_s = time.monotonic()
            try:
                record, problem = self._commit(job, began_s), ""
            except Exception as error:
                record, problem = None, f"step {job.snapshot.step} of rank {job.plan.rank} was not examined: {error!r}"
                self._vault.abandon_own(job.cell.number)
            with self._lock:
                self._waiting.remove(job)
            job.done(record, problem, time.monotonic() - began_s)

    def _commit(self, job: Job, began_s: float) -> Record:
        previous = self._vault.previous(job.cell, job.snapshot)
        try:
            old = None if previous is None else previous.cell.block.memory
            threads = _HURRIED_THREADS if job.hurry.is_set() else 1
            found = examine(job.plan, job.cell.block.memory, old, self._rest(job, began_s + job.budget_s), threads)
        finally:
            if previous is not None:
                self._vault.unpin(previous)
        record = _record(job, found)
        self._points.reach("keeper.examined", step=record.step, rank=record.rank)
        self._vault.commit_own(job.cell.number, record)
        self._points.reach("keeper.committed", step=record.step, rank=record.rank)
        return record

    def _rest(self, job: Job, until_s: float) -> Rest:
        began_s = time.monotonic()

        def rest(length: int) -> None:
            nonlocal began_s
            pause_s = self._pace.pause_s(length, time.monotonic() - began_s, until_s)
            if pause_s > 0:
                job.hurry.wait(pause_s)
            began_s = time.monotonic()

        return rest


def examine(
    plan: ShardPlan,
    memory: memoryview,
    previous: memoryview | None,
    rest: Rest = lambda length: None,
    threads: int = 1,
) -> Findings:
    """Sum a copy, and look at its numbers.

    Args:
        previous: the snapshot before, to see whether anything trained has changed.
        rest: called after every chunk with how many bytes that was, by whichever thread looked at it.
        threads: that share the work.
    """
    from phalanx.checkpoint.keeper.finite import MOST_NAMES, Findings, has_changed

    starts = range(0, plan.data_bytes, CHUNK_BYTES)
    each = max(1, -(-len(starts) // threads))
    shares = [starts[first : first + each] for first in range(0, len(starts), each)]
    if len(shares) <= 1:
        parts = [_examine_chunks(plan, memory, share, rest) for share in shares]
    else:
        with ThreadPoolExecutor(len(shares), "examine") as pool:
            parts = list(pool.map(lambda share: _examine_chunks(plan, memory, share, rest), shares))
    sums = tuple(one for part, _ in parts for one in part)
    sick = tuple(dict.fromkeys(name for _, names in parts for name in names))[:MOST_NAMES]
    changed = None if previous is None else has_changed(plan, memory, previous)
    return Findings(sums, sick, changed)


def _examine_chunks(plan: ShardPlan, memory: memoryview, starts: range, rest: Rest) -> tuple[list[int], list[str]]:
    """The sums of the chunks that begin at `starts`, one behind the other, and what is sick in them."""
    from phalanx.checkpoint.keeper.finite import BLOCK_BYTES, FiniteCheck

    check = FiniteCheck(plan, memory)
    sums: list[int] = []
    for start in starts:
        stop = min(start + CHUNK_BYTES, plan.data_bytes)
        digest = xxh3_64()
        for first in range(start, stop, BLOCK_BYTES):
            last = min(first + BLOCK_BYTES, stop)
            digest.update(memory[first:last])
            check.look(first, last)  # while it is in the cache
        sums.append(digest.intdigest())
        rest(stop - start)
    return sums, check.sick


def _record(job: Job, found: Findings) -> Record:
    taken, snapshot = job.taken, job.snapshot
    return Record(
        step=snapshot.step,
        attempt=snapshot.attempt,
        set_id=snapshot.set_id,
        rank=job.plan.rank,
        shards=job.shards,
        plan_sha256=job.plan.sha256,
        data_bytes=job.plan.data_bytes,
        sums=found.sums,
        state=taken.state,
        state_sum=state_sum(taken.state) if taken.state else 0,
        stepped=taken.stepped,
        changed=found.changed,
        sick=found.sick,
        unix_ns=taken.unix_ns,
        metrics=dict(taken.metrics),
    )
