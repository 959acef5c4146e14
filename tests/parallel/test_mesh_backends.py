"""What the mesh relies on in torch's private parts."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from phalanx.core.layout import Layout
from phalanx.parallel import backends
from phalanx.parallel.place import CollectiveError, Place, shorten

CPU = torch.device("cpu")


def gloo_pair(store: Store, timeout_s: float = 20.0) -> list[Any]:
    made: list[Any] = [None, None]

    def make(index: int) -> None:
        made[index] = backends.make_gloo(PrefixStore("pair", store), index, 2, timeout_s, "pair")

    threads = [threading.Thread(target=make, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def test_a_group_that_is_made_directly_is_in_no_registry() -> None:
    assert [pair.size() for pair in gloo_pair(HashStore())] == [2, 2]
    assert not torch.distributed.is_initialized() and not c10d._world.pg_map


def test_the_timeout_of_a_group_can_be_changed() -> None:
    first, _other = gloo_pair(HashStore(), timeout_s=60.0)
    backends.set_timeout(first, 0.2)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out"):
        first.allreduce([torch.ones(1)]).wait()
    assert time.monotonic() - begin < 10


def test_a_registered_group_is_known_with_its_ranks_until_it_is_unregistered() -> None:
    store = HashStore()
    pair = gloo_pair(store)
    group = backends.register(pair[0], store, (4, 6), "ours", CPU)
    assert c10d._resolve_process_group(c10d.GroupName("ours")) is group
    assert torch.distributed.get_process_group_ranks(group) == [4, 6]
    with pytest.raises(ValueError, match="'ours'"):
        backends.register(pair[0], store, (4, 6), "ours", CPU)
    backends.unregister(group)
    with pytest.raises(RuntimeError, match="ours"):
        c10d._resolve_process_group(c10d.GroupName("ours"))
    assert group not in c10d._world.pg_map and group not in c10d._world.pg_group_ranks


def test_a_collective_error_is_short_for_large_groups_and_has_one_line_of_the_cause() -> None:
    place = Place(7, "node1", Layout(tensor=8))
    error = CollectiveError("all_gather", ("tensor",), range(100), place, RuntimeError("gone\nframe #0"))
    assert str(error).startswith("rank 7 on node1 (layout tp8): all_gather failed in the group over tensor, ranks 0, 1")
    assert "…, 99 (100 in all): gone\n" in str(error) and "frame" not in str(error)
    assert shorten((3, 4)) == "3, 4"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nccl_connects_changes_its_timeout_and_ends() -> None:
    device = torch.device("cuda", 0)
    backend = backends.maker(device)(HashStore(), 0, 1, 60.0, "alone")
    backends.set_timeout(backend, 30.0)
    x = torch.ones(4, device=device)
    backend.allreduce([x]).wait()
    assert x.tolist() == [1.0] * 4
    backends.let_go(backend, is_busy=False)
