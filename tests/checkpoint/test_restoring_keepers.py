"""Restoring from real keepers, over real sockets, also when one is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from keeper_processes import GUARD_S, a_host, until, until_gone
from restoring_helpers import parts_of, save_durable, shards_of, some_tensors
from thread_ranks import ThreadPeers, succeed
from torch import Tensor

from phalanx.checkpoint.format.shard_plan import ShardPlan
from phalanx.checkpoint.keeper.keeper_client import KeeperClient
from phalanx.checkpoint.keeper_contract import Taken
from phalanx.checkpoint.replicas.fetch import PeerCopies
from phalanx.checkpoint.restoring.restore import Restored, restore
from phalanx.checkpoint.snapshot_plans import make_plans
from phalanx.checkpoint.storage.folder_store import LocalStore
from phalanx.core.layout import Layout

LAYOUT = Layout(replicate=2)
SECRET = bytes(32)


@contextmanager
def two_ranks(tensors: dict[str, Tensor], replicated: bool) -> Iterator[tuple[list[KeeperClient], list[memoryview]]]:
    """Ranks of two hosts, whose keepers hold a snapshot of step 3; and the memory that it lies in."""

    def plan(peers: ThreadPeers) -> tuple[ShardPlan, str]:
        shards = shards_of(LAYOUT, peers.rank, tensors)
        plan, _, set_id, _ = make_plans(parts_of(tensors, shards), shards, {}, peers=peers, config={}, layout="dp2")
        return plan, set_id

    plans = succeed(2, plan)
    with a_host(PHALANX_INTERFACE="lo") as here, a_host(PHALANX_INTERFACE="lo") as there:
        keepers = [KeeperClient(address, rank, 2) for rank, address in enumerate((here, there))]
        slots = []
        for keeper, (each, set_id) in zip(keepers, plans, strict=True):
            keeper.begin(1, set_id, 2)
            keeper.lease(each, None, 2, None)
        for keeper, peer in zip(keepers, reversed(keepers), strict=True):
            keeper.replicate_to(peer.endpoint if replicated else None, 1, SECRET)
        for rank, (keeper, (each, _)) in enumerate(zip(keepers, plans, strict=True)):
            until(lambda keeper=keeper: keeper.ready and not keeper.busy)  # type: ignore[misc]
            slots.append(keeper.slot().memory)
            write(keeper, each, rank, tensors)
        for keeper in keepers:
            told = keeper.wait(3, "replicated" if replicated else "committed", GUARD_S)
            assert not any(progress.problem for progress in told)
        yield keepers, slots
        for keeper in keepers:
            keeper.close()


def write(keeper: KeeperClient, plan: ShardPlan, rank: int, tensors: dict[str, Tensor]) -> None:
    mine = parts_of(tensors, shards_of(LAYOUT, rank, tensors))
    slot = keeper.slot()
    for piece in plan.pieces:
        content = bytes(mine[piece.name].reshape(-1).view(torch.uint8).numpy())
        slot.memory[piece.start_bytes : piece.start_bytes + piece.length_bytes] = content
    keeper.taken(slot, Taken(3, json.dumps({"step": 3}) if rank == 0 else "", hurry=True))


def take_back(
    keepers: list[Any], tensors: dict[str, Tensor], store: LocalStore | None = None
) -> tuple[Restored, list[str]]:
    lines: list[str] = []

    def body(peers: ThreadPeers) -> Restored | None:
        shards = shards_of(LAYOUT, peers.rank, tensors, seed=1)
        expected = parts_of(tensors, shards)
        targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        restored = restore(
            targets,
            keeper=keepers[peers.rank],
            store=store,
            report=lines.append,
            shards=shards,
            peers=peers,  # type: ignore[arg-type]
            remote=PeerCopies(SECRET),
        )
        assert all(torch.equal(targets[name], tensor) for name, tensor in expected.items())
        return restored

    restored = succeed(2, body)[0]
    assert restored is not None and restored.state == {"step": 3}
    return restored, lines


def test_both_hosts_live() -> None:
    tensors = some_tensors(1024)
    with two_ranks(tensors, replicated=False) as (keepers, slots):
        restored, lines = take_back(keepers, tensors)
        assert lines == [] and restored.bytes_by_kind["memory"] > 0 and restored.bytes_by_kind["peer"] > 0
        assert any(rate.place.startswith("lo of host ") for rate in restored.rates)
        slots.clear()


def test_a_flipped_bit_in_memory_is_made_good_from_the_replica() -> None:
    tensors = some_tensors(256)
    with two_ranks(tensors, replicated=True) as (keepers, slots):
        assert take_back(keepers, tensors)[1] == []
        slots[0][100] ^= 4
        restored, lines = take_back(keepers, tensors)
        assert len(lines) == 1 and lines[0].startswith("step 3: the copy of rank 0 in memory of host ")
        assert lines[0].endswith("; trying another host's") and restored.source == "peer"
        slots.clear()


@pytest.mark.campaign(but=("True",))
@pytest.mark.parametrize("replicated", [True, False])
def test_a_host_that_is_lost(tmp_path: Path, replicated: bool) -> None:
    tensors = some_tensors(256)
    save_durable(tmp_path, tensors, LAYOUT, 3)
    with two_ranks(tensors, replicated) as (keepers, slots):
        pid = keepers[0].pid
        psutil.Process(pid).kill()
        until_gone(pid)
        restored, _ = take_back(keepers, tensors, LocalStore(tmp_path))
        assert restored.source == ("peer" if replicated else "durable")
        slots.clear()
