"""Threads that sum and examine what has been copied into a slot, and commit it, no faster than training can spare.

numpy is imported by the thread that examines: the keeper starts without waiting for it.
"""

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

from phalanx.checkpoint.format.run_sums import state_sum
from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper_contract import Taken
from phalanx.checkpoint.snapshot_slots import Cell, SnapshotMemory
from phalanx.core.fault_points import NO_POINTS, Points

if TYPE_CHECKING:
    from phalanx.checkpoint.keeper.finite_check import Findings


# The measured rate moves by `_FORGET` of the way with each chunk. Pauses are short, so that a rate that was wrong is
# soon made up for, and a snapshot is examined within `_LONGEST_S`, however rarely one is taken.
_FIRST_BYTES_PER_S = 4e9  # until it has been measured
_FORGET = 0.2
_MAX_PAUSE_S = 0.1
_LONGEST_S = 1.0
_FIRST_INTERVAL_S = 1.0


@dataclass
class Rhythm:
    """When a rank took its last snapshot, and how long the last one took to be durable or to fail (`persist_s`)."""

    persist_s: float = 0.0
    _last_s: float | None = None

    def budget_s(self, now_s: float, *, persist: bool) -> float:
        """Within how many seconds the snapshot that is taken now is examined.

        It and, where it is to become durable, persisting are to be done within half of the interval between snapshots.
        Else leisure would make the interval longer, and a longer interval leisure.

        Args:
            now_s: by a clock that never goes back.
        """
        interval_s = _FIRST_INTERVAL_S if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        return max(min(interval_s / 2 - (self.persist_s if persist else 0.0), _LONGEST_S), 0.0)


class Pace:
    """Spreads the work of some threads over the time there is for it.

    Args:
        threads: how many share it.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._bytes_per_s = _FIRST_BYTES_PER_S

    def expect(self, length: int) -> None:
        """Add to the bytes that are still to be examined."""
        with self._lock:
            self._pending_bytes += length

    def pause_s(self, length: int, took_s: float, until_s: float) -> float:
        """How long to rest after `length` bytes that took `took_s`, to be done with all at `until_s` (monotonic)."""
        with self._lock:
            self._pending_bytes -= length
            if took_s > 0 and length:
                self._bytes_per_s += _FORGET * (length / took_s - self._bytes_per_s)
            # All threads share what is left, at the rate of one.
            needed_s = max(self._pending_bytes, 0) / self._bytes_per_s / self._threads
        left_s = until_s - time.monotonic()
        if needed_s <= 0 or left_s <= needed_s:
            return 0.0
        # Rests in proportion to the work, so that it is spread evenly, but never so long that the rest cannot be done
        # in time.
        return min(took_s * (left_s / needed_s - 1), left_s - needed_s, _MAX_PAUSE_S)


_NICE = 10
_HURRIED_THREADS = 4  # that look at one slot while training waits for it

Rest = Callable[[int], None]


@dataclass(frozen=True)
class ExamineJob:
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
    """Examines slots one after the other.

    Args:
        points: ``keeper.examined`` before a slot is committed, ``keeper.committed`` after.
        threads: how many slots are examined at once.
        give_way: called in each of them before its first one.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        points: Points = NO_POINTS,
        threads: int = 1,
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        self._memory = memory
        self._points = points
        self._give_way = give_way
        self._pace = Pace(threads)
        self._lock = threading.Lock()
        self._waiting: list[ExamineJob] = []
        self._jobs: queue.SimpleQueue[ExamineJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"examiner-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: ExamineJob) -> None:
        """Examine this after all before it; does not wait. If it is in a hurry, so are those before it."""
        # Before it is queued: a thread may take it at once, and its bytes are subtracted as it goes.
        self._pace.expect(job.plan.data_bytes)
        with self._lock:
            self._waiting.append(job)
        # Those before it are in its way.
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
        # To Linux a thread has a priority of its own; training's threads come first.
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        from phalanx.checkpoint.keeper import finite_check  # noqa: F401 (numpy takes a while: here nobody waits for it)

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
                # Otherwise the slot would never be free again, and the rank soon have none.
                self._memory.abandon_own(job.cell.number)
            with self._lock:
                self._waiting.remove(job)
            job.done(record, problem, time.monotonic() - began_s)

    def _commit(self, job: ExamineJob, began_s: float) -> Record:
        # It stays pinned while it is compared, so that no other snapshot is written over it.
        previous = self._memory.previous(job.cell, job.snapshot)
        try:
            old = None if previous is None else previous.cell.block.memory
            threads = _HURRIED_THREADS if job.hurry.is_set() else 1
            until_s, rested_s = began_s + job.budget_s, time.monotonic()

            def rest(length: int) -> None:
                nonlocal rested_s
                pause_s = self._pace.pause_s(length, time.monotonic() - rested_s, until_s)
                # Not a sleep: a hurry ends the pause.
                if pause_s > 0:
                    job.hurry.wait(pause_s)
                rested_s = time.monotonic()

            found = examine(job.plan, job.cell.block.memory, old, rest, threads)
        finally:
            if previous is not None:
                self._memory.unpin(previous)
        taken, snapshot = job.taken, job.snapshot
        record = Record(
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
        self._points.reach("keeper.examined", step=record.step, rank=record.rank)
        self._memory.commit_own(job.cell.number, record)
        self._points.reach("keeper.committed", step=record.step, rank=record.rank)
        return record


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
    from phalanx.checkpoint.keeper.finite_check import MOST_NAMES, Findings, has_changed

    starts = range(0, plan.data_bytes, CHUNK_BYTES)
    # Runs of chunks, so that sums put one behind the other are in the order of the memory.
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
    from phalanx.checkpoint.keeper.finite_check import BLOCK_BYTES, FiniteCheck

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
