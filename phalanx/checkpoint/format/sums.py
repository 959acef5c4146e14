"""The sums that a record has of the elements in a slot, and checking memory against them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import Buffer
from xxhash import xxh3_64_intdigest

from phalanx.checkpoint.format.plan import ShardPlan
from phalanx.checkpoint.format.record import CHUNK_BYTES, Record


def chunk_sums(memory: Buffer, data_bytes: int) -> tuple[int, ...]:
    """XXH3-64 of every `CHUNK_BYTES` of the first `data_bytes` of `memory`; the last run may be shorter.

    Raises:
        ValueError: the memory is shorter.
    """
    return tuple(_sums(memory, data_bytes))


def first_fault(memory: Buffer, record: Record, plan: ShardPlan | None = None) -> str | None:
    """What is wrong with a copy, or None where every sum of its record is right.

    Args:
        memory: the slot's, or a copy of it, from its first byte.
        plan: to name a tensor that lies where the sums differ.
    """
    with memoryview(memory) as whole, whole.cast("B") as view:
        fault = record_fault(record, view.nbytes, plan)
        if fault is not None:
            return fault
        for number in range(len(record.sums)):
            start = number * CHUNK_BYTES
            with view[start : min(start + CHUNK_BYTES, record.data_bytes)] as chunk:
                fault = chunk_fault(chunk, number, record, plan)
            if fault is not None:
                return fault
    return None


def record_fault(record: Record, length_bytes: int, plan: ShardPlan | None = None) -> str | None:
    """What is wrong with a record before any element is looked at, or with memory of this length; None where nothing
    is."""
    if plan is not None and plan.sha256 != record.plan_sha256:
        return f"the record of step {record.step}, rank {record.rank} belongs to another plan"
    state = _state_fault(record)
    if state is not None:
        return state
    if length_bytes < record.data_bytes:
        return f"{length_bytes} bytes are there of {record.data_bytes}"
    expected = -(-record.data_bytes // CHUNK_BYTES)
    if len(record.sums) != expected:
        return f"the record has {len(record.sums)} sums where {record.data_bytes} bytes have {expected}"
    return None


def chunk_fault(chunk: Buffer, number: int, record: Record, plan: ShardPlan | None = None) -> str | None:
    """What is wrong with the run of this number of the elements, or None."""
    found = xxh3_64_intdigest(chunk)
    return None if found == record.sums[number] else _describe(number, found, record, plan)


def state_sum(state: str) -> int:
    """XXH3-64 of the state that a record carries."""
    return xxh3_64_intdigest(state.encode())


def _sums(memory: Buffer, data_bytes: int) -> Iterator[int]:
    with memoryview(memory) as whole, whole.cast("B") as view:
        if view.nbytes < data_bytes:
            raise ValueError(f"{view.nbytes} bytes of memory where {data_bytes} are to be summed")
        for start in range(0, data_bytes, CHUNK_BYTES):
            with view[start : min(start + CHUNK_BYTES, data_bytes)] as chunk:
                yield xxh3_64_intdigest(chunk)


def _state_fault(record: Record) -> str | None:
    found = state_sum(record.state)
    if (not record.state and not record.state_sum) or found == record.state_sum:
        return None
    return f"the state of step {record.step}, rank {record.rank} has the sum {found:016x}, not {record.state_sum:016x}"


def _describe(number: int, found: int, record: Record, plan: ShardPlan | None) -> str:
    start = number * CHUNK_BYTES
    stop = min(start + CHUNK_BYTES, record.data_bytes)
    where = f"chunk {number} (bytes {start} to {stop}) of step {record.step}, rank {record.rank}"
    names = [] if plan is None else _tensors(plan, start, stop)
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        where += f", which holds {names[0]}{more}"
    return f"{where}, has the sum {found:016x}, not {record.sums[number]:016x}"


def _tensors(plan: ShardPlan, start: int, stop: int) -> list[str]:
    return [
        piece.name
        for piece in plan.pieces
        if piece.length_bytes and piece.start_bytes < stop and start < piece.start_bytes + piece.length_bytes
    ]
