"""What ranks say to the store when a run starts: little, in a job of any size; what is replayed is what clients say."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.store_port import port_of

from phalanx.core.layout import Layout
from phalanx.ipc.tree_peers import TreePeers
from phalanx.parallel import process_groups
from phalanx.parallel.rendezvous import open_store

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rendezvous import nccl, startup
from rendezvous.members import Crowd
from rendezvous.nccl import NcclRendezvous, root_index
from rendezvous.proxy import Proxy
from rendezvous.scripts import record
from rendezvous.startup import Everyone, all_meet, answered_bytes, groups_of_rank, sent_bytes
from rendezvous.wire import Kind, Request, requests


@pytest.mark.parametrize("size", [2, 5])
def test_gloo_meets_in_three_requests_whatever_the_size(size: int) -> None:
    script = record(Layout(shard=size), ("shard",), process_groups.make_gloo)
    kinds = [[request.kind for request in said] for said in script.requests]
    assert kinds == [[Kind.SET, Kind.WAIT, Kind.MULTI_GET]] * size
    assert script.extra_connections == 0


def test_a_whole_start_is_replayed_against_a_real_store() -> None:
    """And costs what is taken for it."""
    said = startup.scripts(Everyone(Layout(pipeline=2, shard=2, tensor=2)))
    store = open_store("127.0.0.1", 0, 0, 8, is_host=True)
    crowd = Crowd(("127.0.0.1", port_of(store)), said)
    outcome = crowd.run(timeout_s=30)
    crowd.close()
    assert outcome.requests == sum(map(len, said))
    assert (outcome.sent_bytes, outcome.received_bytes) == (sent_bytes(said), answered_bytes(said))


def test_a_member_whose_peer_says_nothing_is_seen() -> None:
    said = [[*startup.connecting(), *startup.joining(rank, 2)] for rank in range(2)]
    store = open_store("127.0.0.1", 0, 0, 2, is_host=True)
    crowd = Crowd(("127.0.0.1", port_of(store)), said[1:])
    with pytest.raises(TimeoutError, match="1 members still wait"):
        crowd.run(timeout_s=0.1)
    crowd.close()


def test_roots_are_spread_over_the_group() -> None:
    assert [index for index in range(192) if root_index(index, 192, 2) >= 0] == [0, 96]
    assert [root_index(index, 5, 2) for index in range(5)] == [0, -1, -1, 1, -1]


@pytest.mark.parametrize("per_root", [128, 2])
def test_what_members_of_a_group_are_taken_to_say_is_what_clients_say(
    per_root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a group that is large enough for several roots."""
    monkeypatch.setattr(nccl, "RANKS_PER_ROOT", per_root)
    monkeypatch.setattr(startup, "RANKS_PER_ROOT", per_root)
    recorded = record(Layout(shard=5), ("shard",), NcclRendezvous)
    meetings = startup._Meetings()
    taken = [meetings.of(("axes:shard", tuple(range(5))), index) for index in range(5)]
    assert taken == [list(said) for said in recorded.requests]
    assert [request.kind for request in startup.connecting()] == [request.kind for request in recorded.connect]


def test_what_ranks_are_taken_to_say_when_they_meet_is_what_they_say() -> None:
    """40 of them: one below the first has children of its own."""
    size = 40
    host = open_store("127.0.0.1", 0, 0, size, is_host=True)
    proxy = Proxy(("127.0.0.1", port_of(host)), size)

    def meet(rank: int) -> TreePeers:
        store = open_store("127.0.0.1", proxy.ports[rank], rank, size, is_host=False)
        return TreePeers(store, rank, size, host="127.0.0.1", name="here", timeout_s=30.0)

    with ThreadPoolExecutor(size) as pool:
        peers = list(pool.map(meet, range(size)))
        assert list(pool.map(lambda one: one.gather(one.rank), peers)) == [list(range(size))] * size
        proxy.drain()
        before = [len(recording.requests) for recording in proxy.recordings]
        list(pool.map(lambda one: one.ask_highest(one.rank)(), peers))
        list(pool.map(TreePeers.close, peers))
    proxy.drain()
    proxy.close()
    assert [len(recording.requests) for recording in proxy.recordings] == before  # later, the store hears nothing
    for rank, recording in enumerate(proxy.recordings):
        said = [r for r in recording.requests if r.kind not in (Kind.VALIDATE, Kind.PING)]
        taken = startup.joining(rank, size)
        assert [(r.kind, r.keys) for r in said] == [(r.kind, r.keys) for r in taken]
        assert sum(len(r.encode()) for r in said) <= sum(len(r.encode()) for r in taken)


@pytest.mark.slow
def test_every_rank_makes_the_groups_that_others_make_at_their_own_place() -> None:
    """So that four runs of the trainer, in a small layout, tell what all ranks of a large one open."""
    small = Everyone(Layout(pipeline=4, shard=2, tensor=2))
    large = Everyone(Layout(pipeline=4, shard=4, tensor=4), small.layout)
    for everyone, ranks in ((small, (6, 9)), (large, (37, 63))):
        for rank in ranks:
            assert everyone.groups(rank) == groups_of_rank(everyone.layout, rank)


BARS_BYTES = {2: 10_000, 64: 500_000, 2048: 1_000_000_000, 12_288: 10_000_000_000}


@pytest.mark.campaign(but=("2", "64"))
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=2),
        Layout(pipeline=2, shard=4, tensor=8),
        Layout(pipeline=8, shard=32, tensor=8),
        Layout(pipeline=8, shard=192, tensor=8),
    ],
    ids=lambda layout: str(layout.world_size),
)
def test_all_that_a_run_says_to_the_store_while_it_starts(layout: Layout) -> None:
    """MegaScale's 2,048 and 12,288 GPUs; no rank waits for one that waits for it."""
    small = Layout(pipeline=layout.pipeline, shard=min(layout.shard, 2), tensor=min(layout.tensor, 2))
    everyone = Everyone(layout, small)
    said = startup.scripts(everyone)
    assert sent_bytes(said) + answered_bytes(said) <= BARS_BYTES[layout.world_size]
    assert max(map(len, said)) <= 40  # requests of a rank
    assert all_meet(everyone)


def test_nobody_opens_a_group_of_all_ranks_but_for_sums_of_tensors() -> None:
    """What ranks say to each other goes through their tree; a full mesh of gloo would be n^2 connections."""
    made = groups_of_rank(Layout(pipeline=2, shard=2, tensor=2), 0)
    assert [name for name, ranks in made if len(ranks) == 8] == ["axes:pipeline·shard·tensor"]
    assert not any("control" in name for name, _ in made)


texts = st.binary(max_size=20)
said_ = st.one_of(
    st.builds(lambda k, v: Request(Kind.SET, (k,), (v,)), texts, texts),
    st.builds(lambda k: Request(Kind.GET, (k,)), texts),
    st.builds(lambda k, v: Request(Kind.ADD, (k,), (v,)), texts, st.binary(min_size=8, max_size=8)),
    st.builds(lambda ks: Request(Kind.MULTI_GET, tuple(ks)), st.lists(texts, max_size=4)),
    st.builds(lambda ks: Request(Kind.MULTI_SET, tuple(ks), tuple(ks)), st.lists(texts, max_size=4)),
)


@given(st.lists(said_, max_size=5), st.integers(1, 40))
def test_requests_are_read_back_however_they_are_cut(said: list[Request], size: int) -> None:
    whole = b"".join(request.encode() for request in said)
    stream, got = bytearray(), []
    for begin in range(0, len(whole), size):
        stream += whole[begin : begin + size]
        got += requests(stream)
    assert got == said and not stream
