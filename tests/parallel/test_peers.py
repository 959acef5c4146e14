"""Small values exchanged between ranks."""

from __future__ import annotations

from typing import Any

from ranks import ThreadGroups, run_ranks

from phalanx.core.peers import ALONE
from phalanx.parallel.peers import GroupPeers


def test_values_of_different_sizes_reach_every_rank() -> None:
    def body(groups: ThreadGroups) -> tuple[Any, Any]:
        peers = GroupPeers(groups.group("replicate"))
        peers.barrier()
        assert peers.ask_highest(7 * (peers.rank == 1))() == 7
        return peers.gather({"rank": peers.rank, "text": "ä" * peers.rank}), peers.broadcast([peers.rank, "x" * 9])

    for gathered, told in run_ranks(3, body):
        assert gathered == [{"rank": rank, "text": "ä" * rank} for rank in range(3)]
        assert told == [0, "x" * 9]


def test_one_rank_alone() -> None:
    assert ALONE.gather(1) == [1] and ALONE.broadcast(2) == 2 and (ALONE.rank, ALONE.size) == (0, 1)
    ALONE.barrier()
    assert ALONE.ask_highest(3)() == 3
