"""What NCCL groups say to the store, for machines without GPUs: a stand-in for ProcessGroupNCCL that only meets.

Through the same `Store` object, with the keys and sizes of torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
(`broadcastUniqueNCCLID`; `allgatherUniqueNCCLIDs` and `getRootIndex` for groups of more than TORCH_NCCL_RANKS_PER_ROOT
members, 128 by default). What NCCL then sends goes over its own sockets, not through the store.
"""

from __future__ import annotations

import math
from typing import Any

UNIQUE_ID_BYTES = 128
RANKS_PER_ROOT = 128


class NcclRendezvous:
    """The meeting of one member; see `phalanx.parallel.process_groups.Maker`."""

    def __init__(self, store: Any, index: int, size: int, timeout_s: float, name: str) -> None:
        identity = "i" * UNIQUE_ID_BYTES
        if size <= RANKS_PER_ROOT:
            if index == 0:
                store.set("0", identity)
            else:
                store.get("0")
            return
        roots = math.ceil(size / RANKS_PER_ROOT)
        root = root_index(index, size, roots)
        if root >= 0:
            store.set(f"UniqueNCCLID:{root}", identity)
        store.multi_get([f"UniqueNCCLID:{number}" for number in range(roots)])

    def name(self) -> str:
        return "nccl rendezvous"


def root_index(index: int, size: int, roots: int) -> int:
    """Which root this member is, or -1: roots begin runs of members that are as long as one another, or one longer."""
    run, longer = divmod(size, roots)
    limit = longer * (run + 1)
    if index < limit:
        return index // (run + 1) if index % (run + 1) == 0 else -1
    return (index - limit) // run + longer if (index - limit) % run == 0 else -1
