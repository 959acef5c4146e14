"""The back end that stands for NCCL in the tests of layouts: it does what is asked, and finds what would hang there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import ThreadGroups, run_ranks

from phalanx.core.layout import Layout
from phalanx.parallel.group import CollectiveError, Group
from phalanx.parallel.process_groups import make_gloo


def both_send_first(group: Group, other: int) -> None:
    x = torch.ones(2)
    works = [group.send(x, other), group.receive(torch.empty(2), other)]
    for work in works:
        work.wait()


def both_receive_first(group: Group, other: int) -> None:
    works = [group.receive(torch.empty(2), other), group.send(torch.ones(2), other)]
    for work in works:
        work.wait()


def a_message_behind_a_sum(group: Group, other: int) -> None:
    """One waits for the sum before it sends; the other has started to receive before it adds."""
    x, sum_ = torch.ones(2), torch.ones(2)
    if group.index:
        works = [group.receive(x, other), group.all_reduce(sum_)]
    else:
        group.all_reduce(sum_).wait()
        works = [group.send(x, other)]
    for work in works:
        work.wait()


@pytest.mark.parametrize("body", [both_send_first, both_receive_first, a_message_behind_a_sum])
def test_what_hangs_with_nccl_fails_within_seconds_and_names_who_waits_for_what(
    body: Callable[[Group, int], None],
) -> None:
    def rank(groups: ThreadGroups) -> None:
        body(groups.group("replicate"), 1 - groups.rank)

    begin = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        run_ranks(2, rank)
    assert time.monotonic() - begin < 60  # of the group's two minutes
    assert "wait for each other: rank " in str(caught.value)
    assert "rank 0, member 0 of replicate: " in str(caught.value)
    assert "rank 1, member 1 of replicate: " in str(caught.value)
    run_ranks(2, rank, make_gloo)  # which forgives it


def test_who_waits_for_a_rank_that_has_ended_is_told() -> None:
    def rank(groups: ThreadGroups) -> None:
        group = groups.group("replicate")
        group.barrier()
        if groups.rank:
            group.all_reduce(torch.ones(1)).wait()

    with pytest.raises(CollectiveError, match=r"rank 1, member 1 of replicate: all_reduce; rank 0 has ended"):
        run_ranks(2, rank)


def test_a_circle_over_several_groups_is_found() -> None:
    """Each rank waits in the group with the next one: no two of them are in the same."""

    def rank(groups: ThreadGroups) -> None:
        pairs = [groups.named("pair", sorted((groups.rank, (groups.rank + step) % 3))) for step in (1, 2)]
        for pair in sorted(pairs, key=lambda pair: pair.ranks):
            assert pair.backend is not None
        for pair in pairs:
            pair.barrier()

    with pytest.raises(CollectiveError, match="wait for each other: "):
        run_ranks(3, rank)


def test_messages_are_told_apart_by_their_order_alone() -> None:
    def rank(groups: ThreadGroups) -> list[float]:
        group = groups.group("replicate")
        numbers = [torch.full((1,), float(tag)) if group.index == 0 else torch.empty(1) for tag in (1, 2)]
        tags = (1, 2) if group.index == 0 else (2, 1)
        started: Any = group.send if group.index == 0 else group.receive
        for work in [started(x, 1 - group.index, tag) for x, tag in zip(numbers, tags, strict=True)]:
            work.wait()
        return [float(x) for x in numbers]

    assert run_ranks(2, rank) == [[1.0, 2.0]] * 2


@pytest.mark.parametrize(
    "other", [lambda group: group.barrier(), lambda group: group.all_reduce(torch.ones(3)).wait()], ids=["kind", "size"]
)
def test_members_that_start_different_things_are_told_so(other: Callable[[Group], None]) -> None:
    def rank(groups: ThreadGroups) -> None:
        group = groups.group("replicate")
        (other if groups.rank else lambda group: group.all_reduce(torch.ones(2)).wait())(group)

    with pytest.raises(CollectiveError, match="have started different things: member 0: all_reduce"):
        run_ranks(2, rank)


def test_a_buffer_that_is_changed_too_early_is_seen() -> None:
    """What is sent is read when it is received, not when the send is started."""

    def rank(groups: ThreadGroups) -> float:
        group, x = groups.group("replicate"), torch.ones(1)
        if group.index == 0:
            work = group.send(x, 1)
            x.fill_(7.0)
            groups.named("go", (0, 1)).barrier()
            work.wait()
        else:
            groups.named("go", (0, 1)).barrier()
            group.receive(x, 0).wait()
        return float(x)

    assert run_ranks(2, rank) == [7.0, 7.0]


def test_an_exchange_goes_round_a_ring_of_64() -> None:
    def rank(groups: ThreadGroups) -> list[float]:
        group, got = groups.group("context"), []
        for step in (1, 5, 63):
            out = torch.empty(1)
            to, source = (group.index + step) % 64, (group.index - step) % 64
            group.exchange(torch.full((1,), float(group.index)), to, out, source).wait()
            got.append(float(out))
        return got

    for index, got in enumerate(run_ranks(Layout(context=64), rank)):
        assert got == [(index - step) % 64 for step in (1, 5, 63)]
