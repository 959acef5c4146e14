"""The sums of the elements in a slot all at once; the keeper takes them while it copies."""

from __future__ import annotations

from typing_extensions import Buffer
from xxhash import xxh3_64_intdigest

from phalanx.checkpoint.format.shard_plan import CHUNK_BYTES


def chunk_sums(memory: Buffer, data_bytes: int) -> tuple[int, ...]:
    """XXH3-64 of every `CHUNK_BYTES` of the first `data_bytes` of `memory`; the last run may be shorter."""
    with memoryview(memory) as whole, whole.cast("B") as view:
        if view.nbytes < data_bytes:
            raise ValueError(f"{view.nbytes} bytes of memory where {data_bytes} are to be summed")
        return tuple(
            xxh3_64_intdigest(view[start : min(start + CHUNK_BYTES, data_bytes)])
            for start in range(0, data_bytes, CHUNK_BYTES)
        )
