"""Collectives of a group, against what they are defined to do."""

from __future__ import annotations

import pytest
import torch
from ranks import ThreadGroups, run_ranks
from torch import Tensor

from phalanx.core.layout import Layout
from phalanx.parallel.group import Group
from phalanx.parallel.process_groups import make_gloo


def block(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_do_what_they_say(size: int) -> None:
    def body(groups: ThreadGroups) -> tuple[Tensor, ...]:
        group = groups.group("replicate")
        mine = block(group.index, 2 * size, 3)
        summed = mine.clone()
        group.all_reduce(summed).wait()
        gathered = torch.empty(2 * size * size, 3)
        group.all_gather(gathered, mine).wait()
        scattered = torch.empty(2, 3)
        group.reduce_scatter(scattered, mine).wait()
        swapped = torch.empty_like(mine)
        group.all_to_all(swapped, mine).wait()
        root = mine.clone()
        group.broadcast(root, size - 1).wait()
        group.barrier()
        return summed, gathered, scattered, swapped, root

    blocks = [block(rank, 2 * size, 3) for rank in range(size)]
    total = torch.stack(blocks).sum(0)
    for rank, (summed, gathered, scattered, swapped, root) in enumerate(run_ranks(size, body)):
        mine = slice(2 * rank, 2 * rank + 2)
        torch.testing.assert_close(summed, total)
        assert torch.equal(gathered, torch.cat(blocks))
        torch.testing.assert_close(scattered, total[mine])
        assert torch.equal(swapped, torch.cat([b[mine] for b in blocks]))
        assert torch.equal(root, blocks[-1])


def test_a_gather_into_the_own_block_and_over_gloo_a_wider_sum() -> None:
    def body(groups: ThreadGroups) -> tuple[Tensor, Tensor]:
        group = groups.group("replicate")
        buffer = torch.zeros(4, 2)
        mine = buffer[2 * group.index : 2 * group.index + 2]
        mine += group.index + 1
        group.all_gather(buffer, mine).wait()
        wide = torch.empty(2, 2)
        group.reduce_scatter(wide, torch.full((4, 2), 1.0 + group.index / 128, dtype=torch.bfloat16)).wait()
        return buffer, wide

    for buffer, wide in run_ranks(2, body, make_gloo):
        assert buffer[:, 0].tolist() == [1, 1, 2, 2]
        assert wide.dtype == torch.float32 and wide[0, 0] == 2.0 + 1 / 128


def test_what_is_sent_over_gloo_arrives_by_its_tag() -> None:
    def body(groups: ThreadGroups) -> list[float]:
        group = groups.group("pipeline")
        if group.index == 0:
            works = [group.send(torch.full((1,), float(tag)), 1, tag) for tag in (1, 2)]
            for work in works:
                work.wait()
            return []
        got = {tag: torch.empty(1) for tag in (2, 1)}
        for work in [group.receive(x, 0, tag) for tag, x in got.items()]:
            work.wait()
        return [float(got[1]), float(got[2])]

    assert run_ranks(Layout(pipeline=2), body, make_gloo)[1] == [1.0, 2.0]


def test_traffic_counts_calls_and_bytes() -> None:
    def body(groups: ThreadGroups) -> dict[str, int]:
        group = groups.group("replicate")
        group.all_reduce(torch.ones(8)).wait()
        group.all_gather(torch.empty(8), torch.ones(2)).wait()
        group.reduce_scatter(torch.empty(2), torch.ones(8)).wait()
        assert group.traffic.calls == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1}
        return group.traffic.sent_bytes

    for sent in run_ranks(4, body):
        assert sent == {"all_reduce": 48, "all_gather": 24, "reduce_scatter": 24}


def test_a_group_of_one_needs_no_process_group() -> None:
    group = Group.alone()
    x = torch.arange(3.0)
    out = torch.empty(3)
    group.all_reduce(x).wait()
    group.all_gather(out, x).wait()
    assert torch.equal(out, x) and group.traffic.calls == {}
