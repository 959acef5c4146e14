"""What pipelines and rings of any size exchange can be done in the order of NCCL: walked through, without models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ranks import ThreadGroups, run_ranks
from support.fake_nccl import Communicator, HangError, Operation, Part, walk

from phalanx.core.layout import Layout
from phalanx.parallel.config import Schedule
from phalanx.parallel.context.blocks import SequenceSplit
from phalanx.parallel.context.ring import Ring
from phalanx.parallel.pipeline.schedules import Message, Step, Table, channels, make_table, route

Links = dict[tuple[int, int], Communicator]
LOOK_AHEAD = 2  # as `PipelineExecutor` has it


def links_of(table: Table, *, both_ways: bool = False) -> Links:
    """A communicator for each pair and direction; or for each pair."""
    links: Links = {}
    for sender, receiver in channels(table.placement):
        pair = (min(sender, receiver), max(sender, receiver)) if both_ways else (sender, receiver)
        links[sender, receiver] = links.get(pair) or Communicator(f"pipeline {sender} to {receiver}", 2)
    return links


def message(sends: bool, rank: int, other: int, links: Links) -> tuple[Communicator, int, Operation]:
    """A send or a receive of `rank`, in the channel that the executor uses: members in the order of their ranks."""
    link = links[(rank, other) if sends else (other, rank)]
    return link, int(rank > other), Operation("messages", parts=[Part(sends, int(other > rank))])


def program(table: Table, rank: int, links: Links) -> Iterator[tuple[Communicator, int, Operation] | Operation]:
    """What the executor of one rank starts and waits for, when it opens its channels and in a step."""
    for sender, receiver in channels(table.placement):
        if rank in (sender, receiver):
            first = message(rank == sender, rank, receiver if rank == sender else sender, links)
            yield first
            yield first[2]
    on_their_way: dict[Message, Operation] = {}
    for step in route(table, rank, LOOK_AHEAD):
        yield from perform(step, rank, links, on_their_way)
    yield from on_their_way.values()


def perform(
    step: Step, rank: int, links: Links, on_their_way: dict[Message, Operation]
) -> Iterator[tuple[Communicator, int, Operation] | Operation]:
    for coming in step.post:
        started = message(False, rank, coming.sender, links)
        on_their_way[coming] = started[2]
        yield started
    if step.need is not None and step.need.sender != rank:
        yield on_their_way.pop(step.need)
    for sent in step.confirmed:
        yield on_their_way.pop(sent)
    if step.give is not None and step.give.receiver != rank:
        started = message(True, rank, step.give.receiver, links)
        on_their_way[step.give] = started[2]
        yield started


def step_of(table: Table, *, both_ways: bool = False) -> None:
    links = links_of(table, both_ways=both_ways)
    walk({rank: program(table, rank, links) for rank in range(table.placement.ranks)})
    assert not any(queue for link in links.values() for queue in link.queues)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2), ("zbv", 2)]
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 6), (3, 3), (8, 32), (64, 64)])
def test_no_schedule_makes_its_ranks_wait_for_each_other(
    schedule: Schedule, chunks: int, ranks: int, micro_batches: int
) -> None:
    """Also those of pp8·fs192·tp8 with 32 micro-batches: each of its 1,536 pipelines does the same."""
    step_of(make_table(schedule, ranks, chunks, micro_batches))


def test_the_schedule_of_megascale_with_six_chunks() -> None:
    step_of(make_table("interleaved_1f1b", 8, 6, 32))


def test_with_one_communicator_for_both_directions_they_would_wait_for_each_other() -> None:
    """So the walk finds what it is there for: a send behind a receive, and the other way round."""
    with pytest.raises(HangError, match="waits for: "):
        step_of(make_table("1f1b", 2, 1, 4), both_ways=True)


@pytest.mark.campaign(but=("5",))
@pytest.mark.parametrize("window", [None, 5])
def test_keys_and_their_gradients_go_round_a_ring_of_64(window: int | None) -> None:
    """Each rank gets what it needs of each other, in the order in which it asks for it, and its own gradients back."""
    size = 64
    split = SequenceSplit(4 * size, size, balanced=window is None)

    def body(groups: ThreadGroups) -> None:
        ring, rank = Ring(groups.group("context"), split, None), groups.rank
        kv = torch.full((2, 1, 1, split.local_length, 1), float(rank))
        home, going = torch.zeros_like(kv), []
        for step, arrival in enumerate(ring.arrivals(kv, window)):
            assert arrival.owner == (rank - step) % size
            assert (arrival.kv == arrival.owner).all()
            if step:
                going.append(ring.send_home(step, torch.ones_like(arrival.kv), window))
        for work, pieces, places, _ in going:
            work.wait()
            ring.add_pieces(home, pieces, places)
        readers = [split.needed(reader, rank, window) for reader in range(size) if reader != rank]
        for place in range(split.pieces_per_rank):
            count = sum(place in places for places in readers)
            assert (home[:, :, :, ring.queries(place)] == count).all()

    run_ranks(Layout(context=size), body)
