"""What the mesh relies on in torch's private parts."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from phalanx.core.layout import Layout
from phalanx.parallel import process_groups
from phalanx.parallel.group import CollectiveError, Group, RankPlace
from phalanx.parallel.mesh import meeting_place

CPU = torch.device("cpu")


def gloo_pair(store: Store, timeout_s: float = 20.0) -> list[Any]:
    made: list[Any] = [None, None]

    def make(index: int) -> None:
        made[index] = process_groups.make_gloo(PrefixStore("pair", store), index, 2, timeout_s, "pair")

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
    process_groups.set_timeout(first, 0.2)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="Timed out"):
        first.allreduce([torch.ones(1)]).wait()
    assert time.monotonic() - begin < 10


def test_a_registered_group_is_known_with_its_ranks_until_it_is_unregistered() -> None:
    store = HashStore()
    pair = gloo_pair(store)
    group = process_groups.register(pair[0], store, (4, 6), "ours", CPU)
    assert c10d._resolve_process_group(c10d.GroupName("ours")) is group
    assert torch.distributed.get_process_group_ranks(group) == [4, 6]
    with pytest.raises(ValueError, match="'ours'"):
        process_groups.register(pair[0], store, (4, 6), "ours", CPU)
    process_groups.unregister(group)
    with pytest.raises(RuntimeError, match="ours"):
        c10d._resolve_process_group(c10d.GroupName("ours"))
    assert group not in c10d._world.pg_map and group not in c10d._world.pg_group_ranks


def test_a_collective_error_is_short_for_large_groups_and_has_one_line_of_the_cause() -> None:
    place = RankPlace(7, "node1", Layout(tensor=8))
    error = CollectiveError("all_gather", ("tensor",), range(100), place, RuntimeError("gone\nframe #0"))
    assert str(error).startswith("rank 7 on node1 (layout tp8): all_gather failed in the group over tensor, ranks 0, 1")
    assert "…, 99 (100 in all): gone\n" in str(error) and "frame" not in str(error)
    few = CollectiveError("all_gather", ("tensor",), (3, 4), place, RuntimeError("gone"))
    assert "ranks 3, 4: gone" in str(few)


@pytest.mark.parametrize(
    ("name", "ranks", "waited_for"),
    [
        ("axes:tensor", (0, 1), True),
        ("axes:context", (0, 2), True),
        ("axes:context·tensor", (0, 1, 2, 3), True),
        ("named:pipeline 0 to 4", (0, 4), True),
        ("axes:shard", (0, 1), False),
        ("axes:replicate", (0, 1), False),
        ("axes:pipeline·replicate·shard", (0, 1), False),
        ("named:zero", (0, 1), False),
        ("named:tied", (0, 4), False),
        ("named:control", (0, 1), False),
    ],
)
def test_nccl_goes_first_where_a_layer_waits_and_takes_little_where_it_runs_beside(
    name: str, ranks: tuple[int, ...], waited_for: bool
) -> None:
    place = meeting_place(name, ranks)
    assert process_groups.nccl_settings(place) == process_groups.NcclSettings(waited_for, 0)
    assert process_groups.nccl_settings(place, 8) == process_groups.NcclSettings(waited_for, 0 if waited_for else 8)


def test_options_of_nccl_are_those_that_torch_has() -> None:
    """A build of torch for CPUs has no such class; its stubs say what is in it."""
    stubs = (Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi").read_text()
    options = stubs.partition("class ProcessGroupNCCL(Backend)")[2].partition("def __init__")[0]
    assert "is_high_priority_stream: bool" in options and "max_ctas: int" in options


@pytest.mark.parametrize(
    "device",
    [
        torch.device("cpu"),
        pytest.param(
            torch.device("cuda", 0),
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_collective_of_ranks_that_share_a_device(device: torch.device, dtype: torch.dtype) -> None:
    """What travels through the host arrives, whatever is asked for."""
    store, make = HashStore(), process_groups._ThroughHost
    blocks = [torch.arange(12.0).view(4, 3).to(dtype) + 100 * rank for rank in range(2)]

    def rank(index: int) -> dict[str, torch.Tensor]:
        backend = make(process_groups.make_gloo(PrefixStore("shared", store), index, 2, 60.0, "shared"))
        group = Group((0, 1), index, lambda: backend)
        mine, other = blocks[index].to(device), 1 - index
        summed, root = mine.clone(), mine.clone()
        gathered, swapped = mine.new_empty(8, 3), torch.empty_like(mine)
        scattered, wide = mine.new_empty(2, 3), mine.new_empty(2, 3, dtype=torch.float32)
        got, sent_on, uneven = torch.empty_like(mine), torch.empty_like(mine), mine.new_empty(1 if index else 3, 3)
        group.barrier()
        group.all_reduce(summed).wait()
        group.all_gather(gathered, mine).wait()
        group.reduce_scatter(scattered, mine).wait()
        group.reduce_scatter(wide, mine).wait()
        group.all_to_all(swapped, mine).wait()
        rows = [[2, 1], [1, 0]][index]  # also what each gets of the others
        group.all_to_all(uneven, mine[: sum(rows)].contiguous(), rows, rows).wait()
        group.broadcast(root, 1).wait()
        group.exchange(mine, other, got, other).wait()
        work = group.send(mine, other, 7)
        group.receive(sent_on, other, 7).wait()
        work.wait()
        found = {
            "summed": summed, "gathered": gathered, "scattered": scattered, "wide": wide, "swapped": swapped,
            "root": root, "got": got, "sent_on": sent_on, "uneven": uneven,
        }  # fmt: skip
        assert all(x.device == device for x in found.values())
        return {name: x.float().cpu() for name, x in found.items()}

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(rank, range(2)))
    total = blocks[0].float() + blocks[1].float()
    for index, found in enumerate(results):
        half = slice(2 * index, 2 * index + 2)
        expected = {
            "summed": total, "gathered": torch.cat(blocks).float(), "scattered": total[half], "wide": total[half],
            "swapped": torch.cat([block[half] for block in blocks]).float(), "root": blocks[1].float(),
            "got": blocks[1 - index].float(), "sent_on": blocks[1 - index].float(),
            "uneven": torch.cat([blocks[0][:2], blocks[1][:1]]).float() if index == 0 else blocks[0][2:3].float(),
        }  # fmt: skip
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=0, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nccl_connects_changes_its_timeout_and_ends() -> None:
    device = torch.device("cuda", 0)
    backend = process_groups.maker(device)(HashStore(), 0, 1, 60.0, "alone")
    process_groups.set_timeout(backend, 30.0)
    x = torch.ones(4, device=device)
    backend.allreduce([x]).wait()
    assert x.tolist() == [1.0] * 4
    process_groups.let_go(backend, is_busy=False)
