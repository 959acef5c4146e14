"""The memory inside the keeper: which copies of shards are committed in it, and what may be written over.

A *cell* is the memory of one slot. The cells of a rank's own shard are leased to that rank; those of replicas belong to
what receives them. Of both, a cell is free unless it holds the newest committed copy of its shard, is pinned, or is on
its way to being committed. Newest is the highest (attempt, step), since an attempt may begin at an earlier step than
the one before it reached.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from phalanx.checkpoint.format.shard_plan import Record, ShardPlan, SnapshotId
from phalanx.checkpoint.keeper_contract import Held, NotBegunError, RefusedError, Slot
from phalanx.ipc.shared_memory import MemoryBlock

State = Literal["free", "writing", "taken", "committed"]

REPLICA_SLOTS = 2


@dataclass(eq=False)
class Cell:
    """Memory for one snapshot of the shard of `rank`.

    Attributes:
        number: its name; never used again.
        state: ``writing``: what was in it is being written over; ``taken``: written, and not examined yet.
        is_current: False: of an earlier size or owner; it is read, not written to any more.
        record, plan: of what is committed; a plan also of what is on its way.
        pins: how many use what is committed.
        is_doomed: its memory is given back when the last pin goes.
    """

    number: int
    rank: int
    is_replica: bool
    block: MemoryBlock
    state: State = "free"
    is_current: bool = True
    record: Record | None = None
    plan: ShardPlan | None = None
    pins: int = 0
    is_doomed: bool = False

    @property
    def age(self) -> tuple[int, int, int]:
        """Higher is newer; what is not committed is oldest."""
        record = self.record
        return (-1, -1, self.number) if record is None else (record.attempt, record.step, self.number)


@dataclass(frozen=True)
class Pin:
    """A committed copy that stays as it is until `SnapshotMemory.unpin`."""

    cell: Cell
    record: Record
    plan: ShardPlan
    descriptor: int


class SnapshotMemory:
    """All slots: those that ranks lease, and those of replicas. Every method may be called from any thread.

    Args:
        on_change: called, from whichever thread, after anything has become free or committed.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._allocating: defaultdict[tuple[int, bool], threading.Lock] = defaultdict(threading.Lock)
        self._numbers = itertools.count()
        self._cells: dict[int, Cell] = {}
        self._leased: set[int] = set()
        self._attempt = 0

    @property
    def attempt(self) -> int:
        """The highest that has been seen."""
        return self._attempt

    def begin(self, attempt: int) -> None:
        """Refuse lower attempts from now on.

        Raises:
            RefusedError: this one is lower.
        """
        with self._lock:
            self._see(attempt)

    def resume_from(self, snapshot: SnapshotId, attempt: int) -> None:
        """`attempt` goes on from `snapshot`: later copies of earlier attempts, which were not whole, are void.

        Without that they would count as the newest, and the only whole snapshot would be written over first.
        """
        with self._lock:
            for cell in self._cells.values():
                record = cell.record
                if record and snapshot[1::-1] < record.snapshot[1::-1] < (attempt, 0):
                    self._empty(cell)
            self._sweep()
        self._on_change()

    def lease(self, plan: ShardPlan, slots: int) -> list[Cell]:
        """The cells for the own shard of a rank; waits for their allocation.

        Those of the same size that are there are taken over with what is committed in them; copies in others stay
        readable until the second snapshot of the new set comes: then the first is whole on every rank.

        Raises:
            OSError: there is no memory left.
        """
        with self._allocating[plan.rank, False]:
            with self._lock:
                self._leased.add(plan.rank)
            cells = self._ensure(plan, slots, is_replica=False)
        self._on_change()
        return cells

    def end_lease(self, rank: int, tainted: Collection[int] = ()) -> None:
        """The rank has gone: what it was writing is nothing.

        Args:
            tainted: cells that it may still write to, because it has been shut out and yet may be alive.
        """
        with self._lock:
            self._leased.discard(rank)
            for cell in self._of(rank, False):
                if cell.number in tainted:
                    cell.is_current = False
                if cell.state == "writing":
                    self._empty(cell)
            self._sweep()
        self._on_change()

    def free(self, rank: int) -> int | None:
        """The number of a free cell of a rank's own shard."""
        with self._lock:
            cell = self._free(rank, is_replica=False)
        return None if cell is None else cell.number

    def writing(self, rank: int, number: int) -> None:
        """The rank begins to write into a cell that was free."""
        with self._lock:
            cell = self._own(rank, number)
            if cell is self._newest(rank, False):
                raise LookupError(f"slot {number} holds the newest copy of the shard of rank {rank}")
            self._empty(cell)
            cell.state = "writing"

    def taken(self, plan: ShardPlan, number: int, snapshot: SnapshotId) -> Cell:
        """The rank has written a snapshot into a cell; it stays as it is until it is committed or abandoned.

        Raises:
            RefusedError: a later attempt has been seen.
        """
        with self._lock:
            cell = self._own(plan.rank, number)
            if cell.state != "writing":
                raise LookupError(f"slot {number} was not being written")
            self._empty(cell)
            self._see(snapshot.attempt)
            cell.state, cell.plan = "taken", plan
            self._retire(plan.rank, False, snapshot)
        return cell

    def previous(self, cell: Cell, snapshot: SnapshotId) -> Pin | None:
        """The copy to compare a new one in `cell` with: the newest of the same shard, attempt and set; pinned."""
        with self._lock:
            plan_sha256 = None if cell.plan is None else cell.plan.sha256
            newest = self._newest(cell.rank, cell.is_replica)
            if newest is None or newest is cell or newest.record is None:
                return None
            same = newest.record.snapshot[1:] == snapshot[1:] and newest.record.plan_sha256 == plan_sha256
            return self._pin(newest) if same else None

    def commit_own(self, number: int, record: Record) -> None:
        """What was taken is whole. (An attempt that was not refused when it was taken is not refused now.)"""
        with self._lock:
            self._commit(self._cells[number], record)
        self._on_change()

    def abandon_own(self, number: int) -> None:
        """What was taken is not to be kept."""
        with self._lock:
            self._abandon(number)
        self._on_change()

    def place(self, plan: ShardPlan, snapshot: SnapshotId) -> Slot:
        """Memory for a replica that is about to arrive; never that of the newest committed copy of the shard.

        Only ranks of this host begin attempts, whose numbers were claimed in storage: a replica cannot.

        Raises:
            RefusedError: a later attempt has begun. NotBegunError: this one has not.
            OSError: there is no memory left.
        """
        with self._allocating[plan.rank, True]:
            with self._lock:
                self._require(snapshot.attempt)
            self._ensure(plan, REPLICA_SLOTS, is_replica=True)
            with self._lock:
                self._retire(plan.rank, True, snapshot)
                cell = self._free(plan.rank, is_replica=True)
                if cell is None:
                    raise OSError(f"every slot for replicas of rank {plan.rank} is in use")
                self._empty(cell)
                cell.state, cell.plan = "writing", plan
                return Slot(cell.number, cell.block.memory[: plan.data_bytes])

    def commit(self, plan: ShardPlan, slot: Slot, record: Record) -> None:
        """The replica in `slot` is whole and checked.

        Raises:
            RefusedError: a later attempt has begun since it was placed.
        """
        with self._lock:
            try:
                self._require(record.attempt)
            except (RefusedError, NotBegunError):
                self._abandon(slot.number)
                raise
            self._commit(self._cells[slot.number], record)
        self._on_change()

    def abandon(self, plan: ShardPlan, slot: Slot) -> None:
        """What was to come into `slot` did not."""
        self.abandon_own(slot.number)

    def held(self) -> list[Held]:
        """Committed copies, less those that go when their last reader does."""
        with self._lock:
            cells = [cell for cell in self._cells.values() if not cell.is_doomed]
            return [Held(cell.record, cell.is_replica) for cell in cells if cell.record is not None]

    def acquire(self, snapshot: SnapshotId, rank: int) -> Pin:
        """Pin a committed copy until `unpin`; the rank's own rather than a replica.

        Raises:
            LookupError: it is not there any more.
        """
        with self._lock:
            found = [c for c in self._cells.values() if c.record and c.rank == rank and c.record.snapshot == snapshot]
            if not found:
                raise LookupError(f"there is no copy of step {snapshot.step}, attempt {snapshot.attempt}, rank {rank}")
            pin = self._pin(min(found, key=lambda cell: (cell.is_replica, not cell.is_current, -cell.number)))
        self._on_change()
        return pin

    def unpin(self, pin: Pin) -> None:
        """The copy may be overwritten again, as far as this pin goes."""
        with self._lock:
            pin.cell.pins -= 1
            self._sweep()
        self._on_change()

    @contextmanager
    def pin(self, snapshot: SnapshotId, rank: int) -> Iterator[tuple[Record, ShardPlan, int]]:
        """A committed copy, which is not overwritten within the context, and the descriptor of its memory (read only).

        Raises:
            LookupError: it is not there any more.
        """
        pin = self.acquire(snapshot, rank)
        try:
            yield pin.record, pin.plan, pin.descriptor
        finally:
            self.unpin(pin)

    # From here on the lock is held.

    def _see(self, attempt: int) -> None:
        if attempt < self._attempt:
            raise RefusedError(f"attempt {attempt} is over: the keeper has seen attempt {self._attempt}")
        self._attempt = attempt

    def _require(self, attempt: int) -> None:
        """What comes from elsewhere has to be of the attempt that ranks of this host are in."""
        if attempt > self._attempt:
            raise NotBegunError(f"attempt {attempt} has not begun on this host, which is in attempt {self._attempt}")
        self._see(attempt)

    def _of(self, rank: int, is_replica: bool) -> list[Cell]:
        return [cell for cell in self._cells.values() if cell.rank == rank and cell.is_replica == is_replica]

    def _own(self, rank: int, number: int) -> Cell:
        cell = self._cells.get(number)
        if cell is None or not cell.is_current or cell.is_replica or cell.rank != rank or cell.state == "taken":
            raise LookupError(f"slot {number} is not rank {rank}'s to write to")
        return cell

    def _newest(self, rank: int, is_replica: bool) -> Cell | None:
        committed = [cell for cell in self._of(rank, is_replica) if cell.record is not None]
        return max(committed, key=lambda cell: cell.age, default=None)

    def _free(self, rank: int, *, is_replica: bool) -> Cell | None:
        newest = self._newest(rank, is_replica)
        cells = [
            cell
            for cell in self._of(rank, is_replica)
            if cell.is_current and cell is not newest and not cell.pins and cell.state in ("free", "committed")
        ]
        return min(cells, key=lambda cell: cell.age, default=None)

    def _pin(self, cell: Cell) -> Pin:
        assert cell.record is not None and cell.plan is not None
        cell.pins += 1
        return Pin(cell, cell.record, cell.plan, cell.block.reading)

    def _commit(self, cell: Cell, record: Record) -> None:
        cell.record, cell.state = record, "committed"
        self._sweep()

    def _abandon(self, number: int) -> None:
        self._empty(self._cells[number])
        self._sweep()

    def _empty(self, cell: Cell) -> None:
        cell.state, cell.record, cell.plan = "free", None, None

    def _retire(self, rank: int, is_replica: bool, snapshot: SnapshotId) -> None:
        """With the second snapshot of an attempt and set the first is whole everywhere: what is older can go."""
        if not self._has_come_to(rank, is_replica, snapshot):
            return
        for cell in self._cells.values():
            is_leased = not cell.is_replica and cell.rank in self._leased
            is_used = is_leased or self._has_come_to(cell.rank, cell.is_replica, snapshot)
            is_older = cell.record is not None and cell.record.snapshot[1:] != snapshot[1:]
            if not (cell.is_current and is_used) and (is_older or cell.state == "free"):
                cell.is_doomed = True
        self._sweep()

    def _has_come_to(self, rank: int, is_replica: bool, snapshot: SnapshotId) -> bool:
        newest = self._newest(rank, is_replica)
        return newest is not None and newest.record is not None and newest.record.snapshot[1:] == snapshot[1:]

    def _sweep(self) -> None:
        """Give back the memory of cells that nothing will be read from or written to any more."""
        for cell in list(self._cells.values()):
            is_over = cell.is_doomed or (not cell.is_current and cell.state == "free")
            if is_over and not cell.pins and cell.state in ("free", "committed"):
                del self._cells[cell.number]
                cell.block.close()

    # From here on the lock of the shard's allocation is held.

    def _ensure(self, plan: ShardPlan, slots: int, *, is_replica: bool) -> list[Cell]:
        """As many current cells of the right size as wanted; more of them than that are given up."""
        with self._lock:
            cells = self._of(plan.rank, is_replica)
            for cell in cells:
                if cell.block.size_bytes != plan.data_bytes:
                    cell.is_current = False
            usable = sorted((c for c in cells if c.is_current and not c.is_doomed), key=lambda c: c.age, reverse=True)
            for cell in usable[slots:]:
                cell.is_current = False
                cell.is_doomed = cell.state != "taken"  # that may become the newest copy
            self._sweep()
        usable = usable[:slots]
        kind = "replica of rank" if is_replica else "rank"
        while len(usable) < slots:
            block = MemoryBlock(f"checkpoint slot {len(usable)} of {kind} {plan.rank}", plan.data_bytes)
            with self._lock:
                cell = Cell(next(self._numbers), plan.rank, is_replica, block)
                self._cells[cell.number] = cell
            usable.append(cell)
        return usable
