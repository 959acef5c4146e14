from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.chunk_sums import chunk_sums

from phalanx.checkpoint.format.run_sums import first_fault, state_sum
from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES, Piece, Record, ShardPlan

SIZE = 2 * CHUNK_BYTES + 1000
PIECES = (
    Piece("a", "float32", (10,), (0,), (10,), "trained", 0, CHUNK_BYTES),
    Piece("b", "float32", (10,), (0,), (10,), "trained", CHUNK_BYTES, SIZE - CHUNK_BYTES),
)
PLAN = ShardPlan(3, 4, PIECES)


def a_copy() -> tuple[bytearray, Record]:
    memory = bytearray(random.Random(0).randbytes(SIZE + 64))
    sums = chunk_sums(memory, SIZE)
    state = '{"rows": 3}'
    return memory, Record(7, 1, "set", 3, 4, PLAN.sha256, SIZE, sums, state, state_sum(state))


def test_a_sum_for_every_chunk_and_the_rest() -> None:
    memory, record = a_copy()
    assert len(record.sums) == 3
    assert first_fault(memory, record, PLAN) is None
    assert first_fault(memoryview(memory), record) is None


@pytest.mark.parametrize("bit", [0, 8 * CHUNK_BYTES - 1, 8 * CHUNK_BYTES, 8 * SIZE - 1])
def test_a_flipped_bit_is_found_and_its_tensor_named(bit: int) -> None:
    memory, record = a_copy()
    memory[bit // 8] ^= 1 << bit % 8
    fault = first_fault(memory, record, PLAN)
    chunk = bit // 8 // CHUNK_BYTES
    assert fault is not None and f"chunk {chunk} " in fault and f"holds {'ab'[chunk > 0]}" in fault


def test_what_lies_behind_the_elements_does_not_count() -> None:
    memory, record = a_copy()
    memory[SIZE] ^= 1
    assert first_fault(memory, record) is None


def test_too_little_memory_another_plan_or_state() -> None:
    memory, record = a_copy()
    assert "bytes are there" in str(first_fault(memory[: SIZE - 1], record))
    assert "another plan" in str(first_fault(memory, record, ShardPlan(0, 4, PIECES)))
    assert "state" in str(first_fault(memory, replace(record, state='{"rows": 4}')))
    assert "state" in str(first_fault(memory, replace(record, state="")))
    assert "sums" in str(first_fault(memory, replace(record, sums=record.sums[:-1])))
    with pytest.raises(ValueError, match="to be summed"):
        chunk_sums(memory, SIZE + 65)


def test_nothing_to_sum() -> None:
    assert chunk_sums(b"", 0) == ()
    assert first_fault(b"", Record(7, 1, "set", 3, 4, "plan", 0, ())) is None
