from __future__ import annotations

import os

import numpy as np
import pytest
from keeper_processes import until

from phalanx.core.host import available_bytes
from phalanx.ipc.shared_memory import Map, MemoryBlock, _touch

SIZE = 40 << 20


@pytest.mark.parametrize("writable", [True, False])
def test_a_map_is_filled_and_its_bytes_stay(writable: bool) -> None:
    block = MemoryBlock("slot", SIZE)
    content = np.random.default_rng(0).bytes(SIZE)
    block.memory[:] = content
    mapped = Map(block.descriptor if writable else block.reading, SIZE, writable=writable)
    until(lambda: mapped.is_ready)
    assert bytes(mapped.memory) == content and mapped.memory.readonly is not writable
    _touch(np.frombuffer(mapped.memory, np.uint8), writable=writable)
    assert bytes(mapped.memory) == content
    if writable:
        mapped.memory[-1] ^= 1
        assert block.memory[-1] == content[-1] ^ 1
    mapped.close()
    block.close()


def test_a_map_that_somebody_still_looks_at_can_be_closed() -> None:
    block = MemoryBlock("slot", SIZE)
    mapped = Map(block.descriptor, SIZE, writable=True)
    view = np.frombuffer(mapped._map, np.uint8)
    mapped.close()
    assert view[-1] == 0
    block.close()


def test_memory_is_all_there_and_can_neither_shrink_nor_grow() -> None:
    block = MemoryBlock("slot", SIZE)
    assert os.fstat(block.descriptor).st_blocks * 512 >= SIZE
    for size in (0, SIZE - 1, SIZE + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(block.descriptor, size)
    with pytest.raises(PermissionError):
        Map(block.reading, SIZE, writable=True)
    block.close()
    known = available_bytes()
    assert known is not None and known > SIZE
