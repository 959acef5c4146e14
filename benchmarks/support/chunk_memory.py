"""What a sharded chunk holds of memory, measured, and a wait for all of its weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from phalanx.parallel.zero.chunk import ShardedChunk


class MemoryBytes(NamedTuple):
    parameters: int  # weights as the model uses them, and masters where these have memory of their own
    gradients: int  # whole ones, sums, and what is on its way


def memory_bytes(chunk: ShardedChunk) -> MemoryBytes:
    parameters: list[Tensor] = []
    gradients: list[Tensor | None] = []
    for bucket in chunk._buckets:
        parameters += [bucket._weights, bucket._master]
        gradients += [bucket._gradients, bucket._sum, *bucket._sending, bucket._on_wire]
        gradients += [parameter.grad for parameter in bucket.parameters]
    return MemoryBytes(stored_bytes(parameters), stored_bytes(g for g in gradients if g is not None))


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages behind `tensors`, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())


def wait_for_weights(chunk: ShardedChunk) -> None:
    for bucket in chunk._buckets:
        bucket.wait()
