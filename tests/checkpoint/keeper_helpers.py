"""Plans, contents and records for tests of what is kept in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import get_args

from support.chunk_sums import chunk_sums

from phalanx.checkpoint.format.shard_plan import ALIGN_BYTES, Piece, Record, Role, ShardPlan, SnapshotId

SET = "5e7"
_SMALL = bytes(byte & 0x3F for byte in range(256))
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "uint8": 1}


def a_plan(
    rows: Sequence[tuple[str, str, int]] = (("w", "trained", 1000), ("m", "optimizer", 1000)),
    rank: int = 0,
    world_size: int = 1,
    dtype: str = "float32",
) -> ShardPlan:
    """Pieces of (name, role, elements), one behind the other."""
    pieces: list[Piece] = []
    end = 0
    for name, role, count in rows:
        assert role in get_args(Role)
        length = count * WIDTHS[dtype]
        pieces.append(Piece(name, dtype, (count,), (0,), (count,), role, end, length))  # type: ignore[arg-type]
        end += -(-length // ALIGN_BYTES) * ALIGN_BYTES
    return ShardPlan(rank, world_size, tuple(pieces))


def some_bytes(plan: ShardPlan, step: int, attempt: int = 1) -> bytes:
    """What a rank writes at a step: others for every rank, step and attempt; every number is finite."""
    generator = random.Random(f"{plan.rank} {step} {attempt}")
    return generator.randbytes(plan.data_bytes).translate(_SMALL)


def a_record(plan: ShardPlan, content: bytes, step: int, attempt: int = 1, set_id: str = SET) -> Record:
    sums = chunk_sums(content, plan.data_bytes)
    return Record(step, attempt, set_id, plan.rank, plan.world_size, plan.sha256, plan.data_bytes, sums)


def a_snapshot(step: int, attempt: int = 1, set_id: str = SET) -> SnapshotId:
    return SnapshotId(step, attempt, set_id)
