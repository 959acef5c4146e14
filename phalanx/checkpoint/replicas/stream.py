"""The elements of a shard as they come over a link: each chunk is summed while it is in the cache. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from xxhash import xxh3_64

from phalanx.checkpoint.format.plan import ShardPlan
from phalanx.checkpoint.format.record import CHUNK_BYTES, Record
from phalanx.checkpoint.format.sums import state_sum
from phalanx.checkpoint.replicas.link import Link

_PATIENCE_S = 60.0
_MIN_BYTES_PER_S = 1 << 20


def deadline_s(length_bytes: int) -> float:
    """`time.monotonic` until which a transfer may take: a minute, and a second for every MiB."""
    return time.monotonic() + _PATIENCE_S + length_bytes / _MIN_BYTES_PER_S


def receive_chunks(link: Link, memory: memoryview, record: Record, first: int) -> list[int]:
    """Fill `memory`, which begins at chunk `first` of the shard, and say which chunks are not what the record says.

    All of it is read in any case, so that the conversation can go on.

    Raises:
        LinkError: the other side went away, or is too slow.
    """
    until_s = deadline_s(len(memory))
    wrong = []
    for number, start in enumerate(range(0, len(memory), CHUNK_BYTES), start=first):
        hasher = xxh3_64()
        link.receive_into(memory[start : start + CHUNK_BYTES], until_s, hasher.update)
        if hasher.intdigest() != record.sums[number]:
            wrong.append(number)
    return wrong


def spans(record: Record, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Where runs of chunks begin and end, in bytes.

    Raises:
        ValueError: one lies outside of the shard.
    """
    for first, count in runs:
        if not 0 <= first <= first + count <= len(record.sums):
            raise ValueError(f"chunks {first} to {first + count} of {len(record.sums)}")
        yield first * CHUNK_BYTES, min((first + count) * CHUNK_BYTES, record.data_bytes)


def disagreement(record: Record, plan: ShardPlan | None = None) -> str | None:
    """Why a record cannot be one of a shard (of this plan, where it is given), or None; looked at before memory is
    taken."""
    if record.data_bytes < 0 or len(record.sums) != -(-record.data_bytes // CHUNK_BYTES):
        return f"the record has {len(record.sums)} sums for {record.data_bytes} bytes"
    if (record.state or record.state_sum) and state_sum(record.state) != record.state_sum:
        return "the state in the record does not match its sum"
    if plan is None:
        return None
    if plan.sha256 != record.plan_sha256 or plan.rank != record.rank:
        return "the plan is not that of the record"
    if plan.data_bytes != record.data_bytes:
        return f"the record has {record.data_bytes} bytes, its plan {plan.data_bytes}"
    if any(piece.start_bytes < 0 or piece.length_bytes < 0 for piece in plan.pieces):
        return "the plan has a piece outside of its memory"
    return None


def describe(record: Record, chunks: list[int], host: str) -> str:
    """For people: which chunks are wrong."""
    more = f" and {len(chunks) - 1} more" if len(chunks) > 1 else ""
    return f"chunk {chunks[0]}{more} of step {record.step}, rank {record.rank} from {host} does not match its sum"
