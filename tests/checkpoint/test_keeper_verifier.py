from __future__ import annotations

import queue
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keeper_helpers import WIDTHS, a_plan, a_record, a_snapshot, some_bytes
from support.chunk_sums import chunk_sums

from phalanx.checkpoint.format.run_sums import first_fault
from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Record, ShardPlan, is_stale, sick_tensors
from phalanx.checkpoint.keeper.finite_check import BLOCK_BYTES, runs_of
from phalanx.checkpoint.keeper.snapshot_verifier import ExamineJob, Examiner, Pace, Rhythm, examine
from phalanx.checkpoint.keeper_contract import Taken
from phalanx.checkpoint.snapshot_slots import SnapshotMemory

# Larger than a chunk, with pieces that neither begin nor end with one; a frozen weight is `other`.
ROWS = (("frozen", "other", 999), ("w", "trained", 700_001), ("mask", "other", 300_001), ("m", "optimizer", 900_001))
PLAN = a_plan(ROWS)


def memory_of(plan: ShardPlan, step: int = 1) -> bytearray:
    return bytearray(some_bytes(plan, step))


def put(plan: ShardPlan, memory: bytearray, name: str, index: int, bits: bytes) -> None:
    piece = next(piece for piece in plan.pieces if piece.name == name)
    width = len(bits)
    start = piece.start_bytes + (index % (piece.length_bytes // width)) * width
    memory[start : start + width] = bits


def look(plan: ShardPlan, memory: bytearray, previous: bytearray | None = None) -> Record:
    found = examine(plan, memoryview(memory), None if previous is None else memoryview(previous))
    record = a_record(plan, bytes(memory), 2)
    assert found.sums == record.sums
    for threads in (2, 4, 99):  # as for a checkpoint that training waits for
        old = None if previous is None else memoryview(previous)
        assert examine(plan, memoryview(memory), old, threads=threads) == found
    return replace(record, sick=found.sick, changed=found.changed)


NOT_FINITE = {
    "float32": [np.float32(v).tobytes() for v in (np.nan, np.inf, -np.inf)],
    "float64": [np.float64(v).tobytes() for v in (np.nan, np.inf, -np.inf)],
    "float16": [np.float16(v).tobytes() for v in (np.nan, np.inf, -np.inf)],
    "bfloat16": [np.uint16(v).tobytes() for v in (0x7FC0, 0x7F80, 0xFF80, 0xFFFF)],
}
HUGE = {
    "float32": np.float32(np.finfo(np.float32).max).tobytes(),
    "float64": np.float64(np.finfo(np.float64).max).tobytes(),
    "float16": np.float16(np.finfo(np.float16).max).tobytes(),
    "bfloat16": np.uint16(0xFF7F).tobytes(),
}


@pytest.mark.parametrize("dtype", NOT_FINITE)
@pytest.mark.parametrize("name", ["w", "m"])
@pytest.mark.parametrize("index", [0, -1, 123_456])
def test_what_is_not_finite_is_named(dtype: str, name: str, index: int) -> None:
    plan = a_plan(ROWS, dtype=dtype)
    memory = memory_of(plan)
    put(plan, memory, name, index, HUGE[dtype])
    assert look(plan, memory).sick == ()
    for bits in NOT_FINITE[dtype]:
        put(plan, memory, name, index, bits)
        assert sick_tensors([look(plan, memory)]) == (name,)


@pytest.mark.parametrize("dtype", NOT_FINITE)
def test_buffers_and_what_lies_between_pieces_are_not_looked_at(dtype: str) -> None:
    plan = a_plan(
        (("w", "trained", 1001), ("mask", "other", 501), ("m", "optimizer", 77), ("v", "optimizer", 5)), 0, 1, dtype
    )
    memory = bytearray(b"\xff" * plan.data_bytes)
    for piece in plan.pieces:
        if piece.role != "other":
            memory[piece.start_bytes : piece.start_bytes + piece.length_bytes] = bytes(piece.length_bytes)
    assert look(plan, memory).sick == ()


def test_dtypes_without_infinities_are_not_looked_at() -> None:
    plan = a_plan((("w", "trained", 1001),), dtype="uint8")
    assert runs_of(plan) == []
    assert look(plan, bytearray(b"\xff" * plan.data_bytes)).sick == ()


def test_only_some_names_are_told_of_a_model_that_is_all_sick() -> None:
    plan = a_plan([(f"w{number}", "trained", 3000) for number in range(100)])
    sick = look(plan, bytearray(b"\xff" * plan.data_bytes)).sick
    assert 1 <= len(sick) <= 8 and set(sick) <= {piece.name for piece in plan.pieces}


def test_a_step_that_changed_nothing_trained_is_stale() -> None:
    old, new = memory_of(PLAN), memory_of(PLAN)
    for name in ("m", "mask", "frozen"):
        put(PLAN, new, name, 5, b"\x01\x02\x03\x04")
    record = look(PLAN, new, old)
    assert record.changed is False
    assert is_stale([record])
    assert not is_stale([replace(record, stepped=False)])  # learning rate 0, or a step that was skipped
    other = replace(record, rank=1, changed=True)
    assert not is_stale([record, other])


@pytest.mark.parametrize("index", [0, -1, 400_000])
def test_one_trained_number_is_enough(index: int) -> None:
    old, new = memory_of(PLAN), memory_of(PLAN)
    put(PLAN, new, "w", index, b"\x01\x02\x03\x04")
    assert look(PLAN, new, old).changed is True


def test_without_anything_trained_there_is_no_verdict() -> None:
    for plan in (ShardPlan(0, 1, ()), a_plan((("m", "optimizer", 10), ("w", "trained", 0)))):
        memory = memory_of(plan)
        record = look(plan, memory, bytearray(memory))
        assert record.changed is None and not is_stale([record])


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(
        st.tuples(st.sampled_from(["trained", "optimizer", "other"]), st.integers(0, 200_000)), min_size=1, max_size=6
    ),
    dtype=st.sampled_from(sorted(WIDTHS)),
    where=st.floats(0, 1, exclude_max=True),
)
def test_one_changed_byte_in_any_layout(counts: list[tuple[str, int]], dtype: str, where: float) -> None:
    plan = a_plan([(f"t{number}", role, count) for number, (role, count) in enumerate(counts)], dtype=dtype)
    old = memory_of(plan)
    new = bytearray(old)
    if not old:
        return
    at = int(where * len(old))
    new[at] ^= 1
    trained = [p for p in plan.pieces if p.role == "trained" and p.length_bytes]
    expected = any(p.start_bytes <= at < p.start_bytes + p.length_bytes for p in trained) if trained else None
    assert look(plan, new, old).changed is expected


def test_it_commits_what_was_taken_in_the_background() -> None:
    vault = SnapshotMemory()
    vault.lease(PLAN, 2)
    examiner = Examiner(vault)
    told: queue.Queue[Record | None] = queue.Queue()
    for step in (1, 2, 3):
        number = vault.free(0)
        assert number is not None
        vault.writing(0, number)
        cell = vault.taken(PLAN, number, a_snapshot(step))
        cell.block.memory[: PLAN.data_bytes] = some_bytes(PLAN, min(step, 2))
        taken = Taken(step, '{"a": 1}', unix_ns=7, metrics={"loss": 2.5})
        examiner.submit(ExamineJob(cell, PLAN, a_snapshot(step), 1, taken, 30.0, lambda record, *_: told.put(record)))
        examiner.hurry()
        record = told.get(timeout=60)
        assert record is not None and first_fault(cell.block.memory, record, PLAN) is None
        assert record.changed is {1: None, 2: True, 3: False}[step]
        assert (record.state, record.metrics, record.unix_ns) == ('{"a": 1}', {"loss": 2.5}, 7)
    examiner.close()
    assert sorted(held.record.step for held in vault.held()) == [2, 3]


def test_what_cannot_be_examined_is_told_and_its_slot_is_free_again() -> None:
    vault = SnapshotMemory()
    vault.lease(PLAN, 1)
    number = vault.free(0)
    assert number is not None
    vault.writing(0, number)
    cell = vault.taken(PLAN, number, a_snapshot(1))
    broken = a_plan((*ROWS, ("more", "optimizer", 10_000)))
    told: queue.Queue[tuple[Record | None, str, float]] = queue.Queue()
    examiner = Examiner(vault)
    examiner.submit(ExamineJob(cell, broken, a_snapshot(1), 1, Taken(1), 0.0, lambda *outcome: told.put(outcome)))
    record, problem, _ = told.get(timeout=60)
    examiner.close()
    assert record is None and "step 1 of rank 0 was not examined" in problem
    assert vault.free(0) == number


def test_it_takes_no_more_of_a_core_than_it_needs() -> None:
    pace = Pace()
    pace.expect(100)
    now = time.monotonic()
    assert pace.pause_s(50, 1e-3, now + 1000) > 1e-3
    assert pace.pause_s(0, 1e-3, now - 1) == 0.0
    assert pace.pause_s(50, 1e-3, now + 1000) == 0.0  # nothing is left to be done


def test_half_of_the_interval_is_for_examining_and_a_second_at_most() -> None:
    rhythm = Rhythm()
    assert [rhythm.budget_s(now_s, persist=False) for now_s in (0.0, 0.2, 1000.2)] == pytest.approx([0.5, 0.1, 1.0])


def test_blocks_make_up_chunks() -> None:
    assert CHUNK_BYTES % BLOCK_BYTES == 0
    assert chunk_sums(b"", 0) == ()


@pytest.mark.parametrize(("asked_s", "persist_s"), [(0.25, 0.1), (0.25, 0.15), (0.25, 0.6), (1.0, 0.8), (2.0, 30.0)])
def test_leisure_makes_no_checkpoint_rarer_than_storage_does(asked_s: float, persist_s: float) -> None:
    rhythm, now_s, taken_s, examine_s = Rhythm(), 0.0, [], 0.01
    for _ in range(20):
        taken_s.append(now_s)
        budget = rhythm.budget_s(now_s, persist=True)
        rhythm.persist_s = persist_s
        now_s = max(now_s + asked_s, now_s + max(budget, examine_s) + persist_s)
    spacings = [later - earlier for earlier, later in pairwise(taken_s)][2:]
    assert spacings == pytest.approx([max(asked_s, examine_s + persist_s)] * len(spacings))


def test_what_stays_in_memory_is_examined_at_leisure() -> None:
    rhythm = Rhythm()
    assert rhythm.budget_s(0.0, persist=True) == 0.5
    rhythm.persist_s = 60.0
    assert rhythm.budget_s(1.0, persist=False) == 0.5
    assert rhythm.budget_s(2.0, persist=True) == 0.0
