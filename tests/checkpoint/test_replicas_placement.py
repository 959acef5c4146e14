"""Which host keeps the replica of which: nothing that may be lost together holds both copies."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint.replicas.replica_routes import HostInfo, groups_of_hosts, place_replicas
from phalanx.core.layout import Layout

Shape = tuple[int, int, int]


@st.composite
def clusters(draw: st.DrawFn) -> list[HostInfo]:
    count = draw(st.integers(2, 14))
    racks, groups = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    return [
        HostInfo(
            f"h{i}",
            draw(st.one_of(st.none(), st.integers(0, racks - 1).map(str))),
            draw(st.frozensets(st.integers(0, groups - 1).map(str), max_size=2)),
        )
        for i in range(count)
    ]


def kind(host: HostInfo, peer: HostInfo) -> int:
    """How bad a peer is, as the docstring of `place_replicas` has it; worst for the host itself."""
    same_rack = host.rack is not None and host.rack == peer.rack
    same_group = bool(host.groups & peer.groups)
    return 9 if host == peer else 2 * same_group + same_rack


@settings(max_examples=40)
@given(clusters())
def test_every_host_has_a_peer_of_the_best_kind_that_exists_for_it(hosts: list[HostInfo]) -> None:
    places = place_replicas(hosts)
    by_name = {host.name: host for host in hosts}
    assert places.peer_of.keys() == by_name.keys()
    for host in hosts:
        best = min(kind(host, other) for other in hosts)
        assert kind(host, by_name[places.peer_of[host.name]]) == best
    said = any("one loss can take both" in line for line in places.warnings)
    assert said == any(kind(by_name[a], by_name[b]) for a, b in places.peer_of.items())


@settings(max_examples=40)
@given(clusters(), st.randoms())
def test_the_order_in_which_hosts_are_named_does_not_matter(hosts: list[HostInfo], order: random.Random) -> None:
    shuffled = hosts[:]
    order.shuffle(shuffled)
    assert place_replicas(shuffled) == place_replicas(hosts)


@settings(max_examples=25)
@given(clusters().filter(lambda hosts: len(hosts) <= 5))
def test_no_other_assignment_is_better_balanced(hosts: list[HostInfo]) -> None:
    best = {host.name: min(kind(host, other) for other in hosts) for host in hosts}
    options = [[other.name for other in hosts if kind(host, other) == best[host.name]] for host in hosts]
    least = min(most(list(chosen)) for chosen in itertools.product(*options))
    places = place_replicas(hosts)
    assert most(list(places.peer_of.values())) == least
    assert (least > 1) == any(f"keeps {least} replicas" in line for line in places.warnings)


def most(peers: list[str]) -> int:
    return max(map(peers.count, peers))


def regular(pipeline: int, data: int, per_rack: int) -> list[HostInfo]:
    """A pp × dp job of 8 tensor-parallel ranks a host, hosts in racks one after the other."""
    layout = Layout(pipeline=pipeline, replicate=data, tensor=8)
    ranks = {f"h{i:04}": range(8 * i, 8 * i + 8) for i in range(pipeline * data)}
    groups = groups_of_hosts(layout, ranks)
    return [HostInfo(name, f"r{i // per_rack}", groups[name]) for i, name in enumerate(ranks)]


@pytest.mark.parametrize("shape", [(2, 2, 1), (4, 4, 2), (3, 5, 4), (8, 4, 8), (1, 6, 2), (16, 12, 24)])
def test_the_loss_of_a_host_a_rack_or_a_group_leaves_a_copy_of_every_shard(shape: Shape) -> None:
    hosts = regular(*shape)
    places = place_replicas(hosts)
    assert places.warnings == []
    assert sorted(places.peer_of.values()) == [host.name for host in hosts]
    losses = [{host.name} for host in hosts]
    losses += [{h.name for h in hosts if h.rack == rack} for rack in {h.rack for h in hosts}]
    losses += [{h.name for h in hosts if g in h.groups} for g in frozenset().union(*(h.groups for h in hosts))]
    assert len(losses) >= len(hosts) + 2
    for lost in losses:
        assert not any(host.name in lost and places.peer_of[host.name] in lost for host in hosts)


@pytest.mark.parametrize(
    ("hosts", "warning"),
    [
        ([HostInfo("a", "r"), HostInfo("b", "r")], "than a host of the same rack exists for a, b"),
        (
            [HostInfo("a", "r", frozenset("g")), HostInfo("b", "s", frozenset("g"))],
            "same parallel group exists for a, b",
        ),
        ([HostInfo("a", "r", frozenset("g")), HostInfo("b", "r", frozenset("g"))], "same rack and parallel group"),
        ([HostInfo("a"), HostInfo("b")], "the rack of a, b is not known"),
        ([HostInfo("a", "r"), HostInfo("b", "s"), HostInfo("c", "s")], "a keeps 2 replicas"),
    ],
)
def test_what_cannot_be_had_is_said(hosts: list[HostInfo], warning: str) -> None:
    places = place_replicas(hosts)
    assert any(warning in line for line in places.warnings), places.warnings
    assert all(host != peer for host, peer in places.peer_of.items())


def test_the_rack_gives_way_before_the_group() -> None:
    hosts = [HostInfo("a", "r", frozenset("g")), HostInfo("b", "r", frozenset("h")), HostInfo("c", "s", frozenset("g"))]
    assert place_replicas(hosts).peer_of["a"] == "b"


def test_one_host_has_no_peer() -> None:
    places = place_replicas([HostInfo("a")])
    assert places.peer_of == {}
    assert "one host only" in places.warnings[0]


def test_two_hosts_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two hosts have the same name: a"):
        place_replicas([HostInfo("a"), HostInfo("b"), HostInfo("a")])


@pytest.mark.campaign
def test_1536_hosts_take_little_time() -> None:
    """12,288 ranks. On one core of a laptop: 0.03 s in racks of 32, 0.5 s for the worst below; bounds are CPU time."""
    shuffled = regular(12, 128, 32)
    racks = [host.rack for host in shuffled]
    random.Random(3).shuffle(racks)
    odd = [HostInfo(host.name, rack, host.groups) for host, rack in zip(shuffled, racks, strict=True)]
    crowded = [HostInfo(f"h{i:04}", "big" if i < 1000 else f"r{i}") for i in range(1536)]
    for hosts in (shuffled, odd, crowded):
        began = time.process_time()
        places = place_replicas(hosts)
        assert len(places.peer_of) == 1536
        assert time.process_time() - began < 5.0  # an algorithm that is quadratic in Python's sets takes a minute


def test_groups_of_hosts_are_those_that_its_ranks_share_with_ranks_elsewhere() -> None:
    layout = Layout(pipeline=2, replicate=2, tensor=2)
    groups = groups_of_hosts(layout, {"a": [0, 1], "b": [2, 3], "c": [4, 5], "d": [6, 7]})
    assert groups["a"] & groups["c"] == {"pipeline *.0.0.0.0", "pipeline *.0.0.0.1"}
    assert not groups["a"] & groups["b"]
    assert not groups["a"] & groups["d"]
    assert groups_of_hosts(Layout(replicate=4), {"a": [0, 1], "b": [2, 3]}) == {"a": frozenset(), "b": frozenset()}
    (one, other) = groups_of_hosts(Layout(replicate=4), {"a": [0, 1], "b": [2, 3]}, ("replicate",)).values()
    assert one == other
