from __future__ import annotations

import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from keeper_helpers import SET, a_plan, a_record, a_snapshot, some_bytes

from phalanx.checkpoint.format.run_sums import first_fault
from phalanx.checkpoint.format.shard_plan import ShardPlan
from phalanx.checkpoint.keeper_contract import NotBegunError, RefusedError
from phalanx.checkpoint.snapshot_slots import Cell, Pin, SnapshotMemory
from phalanx.ipc import shared_memory

PLAN = a_plan()
LARGER = a_plan((("w", "trained", 5000),))


def take(vault: SnapshotMemory, plan: ShardPlan, step: int, attempt: int = 1, set_id: str = SET) -> int:
    number = vault.free(plan.rank)
    assert number is not None
    vault.writing(plan.rank, number)
    content = some_bytes(plan, step, attempt)
    cell = vault._cells[number]
    cell.block.memory[: len(content)] = content
    vault.taken(plan, number, a_snapshot(step, attempt, set_id))
    vault.commit_own(number, a_record(plan, content, step, attempt, set_id))
    return number


def arrive(vault: SnapshotMemory, plan: ShardPlan, step: int, attempt: int = 1) -> None:
    vault.begin(attempt)
    slot = vault.place(plan, a_snapshot(step, attempt))
    content = some_bytes(plan, step, attempt)
    slot.memory[:] = content
    vault.commit(plan, slot, a_record(plan, content, step, attempt))


def steps(vault: SnapshotMemory) -> list[tuple[int, int]]:
    return sorted((held.record.attempt, held.record.step) for held in vault.held())


def test_the_older_copy_is_written_over() -> None:
    vault = SnapshotMemory()
    vault.lease(PLAN, 2)
    used = [take(vault, PLAN, step) for step in (1, 2, 3)]
    assert used[0] != used[1] and used[2] == used[0]
    assert steps(vault) == [(1, 2), (1, 3)]


def test_what_is_taken_over_keeps_what_is_committed() -> None:
    vault = SnapshotMemory()
    first = vault.lease(PLAN, 2)
    take(vault, PLAN, 1)
    vault.end_lease(0)
    assert {cell.number for cell in vault.lease(PLAN, 2)} == {cell.number for cell in first}
    with vault.pin(a_snapshot(1), 0) as (record, plan, descriptor):
        assert plan == PLAN
        assert first_fault(os.pread(descriptor, plan.data_bytes, 0), record, plan) is None
        with pytest.raises(OSError, match=r".*"):
            os.pwrite(descriptor, b"x", 0)


def test_copies_of_another_size_go_with_the_second_snapshot_of_the_new_set() -> None:
    vault = SnapshotMemory()
    vault.lease(PLAN, 2)
    arrive(vault, a_plan(rank=7), 1)
    take(vault, PLAN, 1)
    take(vault, PLAN, 2)
    vault.end_lease(0)
    vault.begin(2)
    vault.lease(LARGER, 2)
    take(vault, LARGER, 3, 2, "new")
    assert steps(vault) == [(1, 1), (1, 1), (1, 2), (2, 3)]
    with vault.pin(a_snapshot(2), 0) as (record, plan, descriptor):
        take(vault, LARGER, 4, 2, "new")
        assert steps(vault) == [(2, 3), (2, 4)]  # the other is only read to its end
        assert first_fault(os.pread(descriptor, plan.data_bytes, 0), record, plan) is None
    assert steps(vault) == [(2, 3), (2, 4)]
    assert len(vault._cells) == 2


def test_a_copy_that_was_cut_off_leaves_the_older_ones() -> None:
    vault = SnapshotMemory()
    vault.lease(PLAN, 2)
    take(vault, PLAN, 1)
    number = vault.free(0)
    assert number is not None
    vault.writing(0, number)
    vault.end_lease(0)
    vault.lease(PLAN, 2)
    assert steps(vault) == [(1, 1)]
    assert vault.free(0) == number


def test_lower_attempts_are_refused() -> None:
    vault = SnapshotMemory()
    vault.lease(PLAN, 2)
    number = vault.free(0)
    assert number is not None
    vault.begin(1)
    replica = vault.place(a_plan(rank=1), a_snapshot(5, 1))
    vault.begin(2)
    with pytest.raises(RefusedError):
        vault.begin(1)
    vault.writing(0, number)
    with pytest.raises(RefusedError):
        vault.taken(PLAN, number, a_snapshot(5, 1))
    with pytest.raises(RefusedError):
        vault.place(a_plan(rank=1), a_snapshot(6, 1))
    with pytest.raises(RefusedError):
        vault.commit(a_plan(rank=1), replica, a_record(a_plan(rank=1), bytes(replica.memory), 5, 1))
    assert vault.held() == []
    assert vault.free(0) is not None
    vault.place(a_plan(rank=1), a_snapshot(6, 2))


def test_only_what_was_free_is_written_to() -> None:
    vault = SnapshotMemory()
    vault.lease(PLAN, 2)
    newest = take(vault, PLAN, 1)
    other = vault.free(0)
    assert other is not None
    replica = vault.place(PLAN, a_snapshot(1))
    for number in (newest, replica.number, 77):
        with pytest.raises(LookupError):
            vault.writing(0, number)
    for number in (newest, other, replica.number, 77):
        with pytest.raises(LookupError):
            vault.taken(PLAN, number, a_snapshot(2))
    assert steps(vault) == [(1, 1)]


def test_what_an_attempt_goes_on_from_counts_as_the_newest() -> None:
    vault = SnapshotMemory()
    vault.lease(PLAN, 2)
    take(vault, PLAN, 9)
    whole = vault.acquire(a_snapshot(9), 0).cell.number
    take(vault, PLAN, 10)
    vault.unpin(vault.acquire(a_snapshot(9), 0))
    vault.begin(2)
    vault.resume_from(a_snapshot(9), 2)
    assert steps(vault) == [(1, 9)]
    assert vault.free(0) not in (None, whole)


def test_a_slot_that_a_zombie_may_still_write_to_is_replaced() -> None:
    vault = SnapshotMemory()
    vault.lease(PLAN, 2)
    take(vault, PLAN, 1)
    take(vault, PLAN, 2)
    offered = vault.free(0)
    assert offered is not None
    vault.end_lease(0, [offered])
    numbers = {cell.number for cell in vault.lease(PLAN, 2)}
    assert offered not in numbers and len(numbers) == 2
    assert steps(vault) == [(1, 1), (1, 2)]


def test_memory_that_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 1000)
    with pytest.raises(OSError, match="slot 0 of rank 0 needs 20000 bytes of memory, and 1000 are available"):
        SnapshotMemory().lease(LARGER, 2)


def test_more_and_fewer_slots() -> None:
    vault = SnapshotMemory()
    vault.lease(PLAN, 2)
    take(vault, PLAN, 1)
    take(vault, PLAN, 2)
    assert len(vault.lease(PLAN, 3)) == 3
    assert steps(vault) == [(1, 1), (1, 2)]
    assert len(vault.lease(PLAN, 1)) == 1
    assert steps(vault) == [(1, 2)]
    assert vault.free(0) is None


def test_fewer_slots_while_a_snapshot_is_examined() -> None:
    vault = SnapshotMemory()
    vault.lease(PLAN, 3)
    number = vault.free(0)
    assert number == 0
    vault.writing(0, number)
    vault.taken(PLAN, number, a_snapshot(1))
    vault.end_lease(0)
    assert len(vault.lease(PLAN, 2)) == 2
    vault.commit_own(number, a_record(PLAN, bytes(PLAN.data_bytes), 1))
    assert steps(vault) == [(1, 1)]
    take(vault, PLAN, 2)
    take(vault, PLAN, 3)
    assert max(steps(vault)) == (1, 3)


def test_what_is_only_read_to_its_end_is_not_offered() -> None:
    vault = SnapshotMemory()
    arrive(vault, PLAN, 1)
    pin = vault.acquire(a_snapshot(1), 0)
    vault.begin(2)
    vault.lease(PLAN, 2)
    take(vault, PLAN, 2, 2)
    take(vault, PLAN, 3, 2)
    assert steps(vault) == [(2, 2), (2, 3)]
    assert os.pread(pin.descriptor, 4, 0)
    vault.unpin(pin)


def test_nothing_at_all_can_be_kept() -> None:
    vault = SnapshotMemory()
    empty = ShardPlan(0, 1, ())
    vault.lease(empty, 2)
    take(vault, empty, 1)
    arrive(vault, ShardPlan(1, 1, ()), 1)
    assert len(vault.held()) == 2


class Vaults(RuleBasedStateMachine):
    """Ranks come and go, with two sizes, one to an attempt; replicas arrive; readers hold on to copies."""

    def __init__(self) -> None:
        super().__init__()
        self.vault = SnapshotMemory()
        self.attempt = 1
        self.step = 0
        self.plan = PLAN
        self.plans: dict[int, ShardPlan] = {}
        self.leased = False
        self.taken: tuple[Cell, int, bytes] | None = None
        self.pins: list[tuple[Pin, bytes]] = []
        self.newest: dict[bool, tuple[int, int]] = {}

    @precondition(lambda self: not self.leased)
    @rule(plan=st.sampled_from([PLAN, LARGER]), slots=st.integers(2, 3), higher=st.booleans())
    def lease(self, plan: ShardPlan, slots: int, higher: bool) -> None:
        self.attempt += higher
        self.vault.begin(self.attempt)
        self.plan, self.leased = self.plans.setdefault(self.attempt, plan), True
        self.vault.lease(self.plan, slots)

    @precondition(lambda self: self.leased)
    @rule()
    def leave(self) -> None:
        self.vault.end_lease(0)
        self.leased = False

    @precondition(lambda self: self.leased and self.taken is None)
    @rule(finished=st.booleans())
    def write(self, finished: bool) -> None:
        number = self.vault.free(0)
        if number is None:
            return
        cell = self.vault._cells[number]
        assert not cell.pins and cell.is_current and cell.block.size_bytes == self.plan.data_bytes
        self.step += 1
        content = some_bytes(self.plan, self.step, self.attempt)
        self.vault.writing(0, number)
        if not finished:
            cell.block.memory[:100] = bytes(100)
            self.leave()
            return
        cell.block.memory[: len(content)] = content
        self.vault.taken(self.plan, number, a_snapshot(self.step, self.attempt, self.plan.sha256))
        self.taken = cell, self.attempt, content

    @precondition(lambda self: self.taken is not None)
    @rule(good=st.booleans())
    def examined(self, good: bool) -> None:
        assert self.taken is not None
        cell, attempt, content = self.taken
        self.taken = None
        plan = cell.plan
        assert plan is not None and bytes(cell.block.memory) == content
        if good:
            self.vault.commit_own(cell.number, a_record(plan, content, self.step, attempt, plan.sha256))
            self.newest[False] = attempt, self.step
        else:
            self.vault.abandon_own(cell.number)

    @rule(plan=st.sampled_from([PLAN, LARGER]), whole=st.booleans(), lower=st.booleans())
    def arrives(self, plan: ShardPlan, whole: bool, lower: bool) -> None:
        if lower:
            with pytest.raises(RefusedError):
                self.vault.place(plan, a_snapshot(self.step, self.vault.attempt - 1))
            return
        attempt = max(self.attempt, self.vault.attempt)
        plan = self.plans.setdefault(attempt, plan)
        if sum(pin.cell.is_replica for pin, _ in self.pins) > 0:
            return  # a slot may be held by a reader: that is an error of its own
        self.step += 1
        if attempt > self.vault.attempt:  # which no replica begins, but a rank of the host does
            with pytest.raises(NotBegunError):
                self.vault.place(plan, a_snapshot(self.step, attempt, plan.sha256))
            self.vault.begin(attempt)
        slot = self.vault.place(plan, a_snapshot(self.step, attempt, plan.sha256))
        content = some_bytes(plan, self.step, attempt)
        slot.memory[:] = content
        if whole:
            self.vault.commit(plan, slot, a_record(plan, content, self.step, attempt, plan.sha256))
            self.newest[True] = attempt, self.step
        else:
            self.vault.abandon(plan, slot)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        held = self.vault.held()
        if held:
            record = data.draw(st.sampled_from(held)).record
            pin = self.vault.acquire(record.snapshot, 0)
            self.pins.append((pin, os.pread(pin.descriptor, record.data_bytes, 0)))

    @precondition(lambda self: bool(self.pins))
    @rule()
    def let_go(self) -> None:
        pin, _ = self.pins.pop(0)
        self.vault.unpin(pin)

    @invariant()
    def the_newest_committed_copies_are_there(self) -> None:
        held = self.vault.held()
        for is_replica, newest in self.newest.items():
            found = [(h.record.attempt, h.record.step) for h in held if h.is_replica == is_replica]
            if is_replica or newest[0] == self.vault.attempt:
                assert not found or max(found) == newest
            if newest[0] == self.vault.attempt:
                assert newest in found

    @invariant()
    def committed_copies_match_their_records(self) -> None:
        for cell in self.vault._cells.values():
            if cell.record is not None:
                assert first_fault(cell.block.memory, cell.record, cell.plan) is None

    @invariant()
    def what_is_held_stays_as_it_is(self) -> None:
        for pin, content in self.pins:
            assert os.pread(pin.descriptor, len(content), 0) == content

    def teardown(self) -> None:
        for cell in self.vault._cells.values():
            cell.block.close()


Vaults.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestVaults = Vaults.TestCase
