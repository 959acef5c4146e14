"""What members say to the store grows with neither their group nor the job; what is replayed is what clients said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.layout import Layout
from phalanx.parallel import backends
from phalanx.parallel.store import open_store, port_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rendezvous.members import Crowd
from rendezvous.nccl import NcclRendezvous, root_index
from rendezvous.scripts import record, scripts
from rendezvous.wire import Kind, Request, requests


@pytest.mark.parametrize("size", [2, 5])
def test_gloo_meets_in_three_requests_whatever_the_size(size: int) -> None:
    script = record(Layout(shard=size), ("shard",), backends.make_gloo)
    kinds = [[request.kind for request in said] for said in script.requests]
    assert kinds == [[Kind.SET, Kind.WAIT, Kind.MULTI_GET]] * size
    assert script.extra_connections == 0


def test_replayed_members_of_all_groups_meet_in_a_real_store() -> None:
    layout = Layout(pipeline=2, shard=3, tensor=2)
    recorded = {axes: record(layout, axes, NcclRendezvous) for axes in (("tensor",), ("shard",), ("pipeline",))}
    said = scripts(layout, recorded)
    assert max(map(len, said)) == 2 + 3 * 2  # to connect; wait and get in three groups
    store = open_store("127.0.0.1", 0, 0, layout.world_size, is_host=True)
    crowd = Crowd(("127.0.0.1", port_of(store)), said)
    outcome = crowd.run(timeout_s=30)
    crowd.close()
    assert outcome.requests == sum(map(len, said))
    assert store.num_keys() >= len(
        layout.groups(("tensor",)) + layout.groups(("shard",)) + layout.groups(("pipeline",))
    )


def test_a_member_whose_peer_says_nothing_is_seen() -> None:
    layout = Layout(tensor=2)
    said = scripts(layout, {("tensor",): record(layout, ("tensor",), NcclRendezvous)})
    store = open_store("127.0.0.1", 0, 0, 2, is_host=True)
    crowd = Crowd(("127.0.0.1", port_of(store)), said[1:])
    with pytest.raises(TimeoutError, match="1 members still wait"):
        crowd.run(timeout_s=0.1)
    crowd.close()


def test_roots_are_spread_over_the_group() -> None:
    assert [index for index in range(192) if root_index(index, 192, 2) >= 0] == [0, 96]
    assert [root_index(index, 5, 2) for index in range(5)] == [0, -1, -1, 1, -1]


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
