"""Times of messages inside a host and between hosts."""

import math

import numpy as np
import pytest
from hardware_rows import A100_COLLECTIVES
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.hardware import cluster_names, load_cluster

CLUSTERS = {name: load_cluster(name) for name in cluster_names()}
EVERY = pytest.mark.parametrize("name", list(CLUSTERS))
KINDS = st.sampled_from(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"))
BYTES = st.floats(1, 1e11)
NIC = 25e9 * 0.95


def test_collectives_of_a_host_are_as_measured() -> None:
    errors = [
        math.log(CLUSTERS["selene"].collective_s(kind, num_bytes, ranks) / (us * 1e-6))
        for kind, ranks, num_bytes, us in A100_COLLECTIVES
    ]
    assert np.abs(errors).mean() < 0.05
    assert abs(np.mean(errors)) < 0.03


def test_fifty_megabytes_on_eight_a100_go_at_155_to_165_gb_per_s() -> None:
    seconds = CLUSTERS["selene"].collective_s("all_reduce", 50e6, 8)
    assert 155e9 < 2 * 7 / 8 * 50e6 / seconds < 165e9


@EVERY
@given(kind=KINDS, num_bytes=BYTES, more=st.floats(1, 100), ranks=st.integers(1, 4096), stride=st.integers(1, 64))
def test_more_bytes_never_take_less_time(
    name: str, kind: str, num_bytes: float, more: float, ranks: int, stride: int
) -> None:
    cluster = CLUSTERS[name]
    few = cluster.collective_s(kind, num_bytes, ranks, stride)
    assert cluster.collective_s(kind, num_bytes * more, ranks, stride) >= few * (1 - 1e-9)


@given(kind=KINDS, num_bytes=BYTES, hosts=st.integers(2, 512), inside=st.sampled_from((1, 2, 4, 8)))
def test_more_hosts_never_take_less_time(kind: str, num_bytes: float, hosts: int, inside: int) -> None:
    stride = 8 // inside
    few, many = (
        CLUSTERS["selene"].collective_s(kind, num_bytes, inside * count, stride) for count in (hosts, 2 * hosts)
    )
    assert many >= few * (1 - 1e-9)


@EVERY
@given(num_bytes=BYTES, ranks=st.integers(2, 4096), stride=st.integers(1, 64))
def test_a_ring_never_beats_the_adapters(name: str, num_bytes: float, ranks: int, stride: int) -> None:
    cluster = CLUSTERS[name]
    inside = cluster.members_per_host(ranks, stride)
    if inside < ranks:
        nic = cluster.nics_per_host / cluster.devices_per_host * cluster.value("network.nic_bytes_per_s")
        assert cluster.collective_s("all_gather", num_bytes, ranks, stride) >= (1 - 1 / ranks) * num_bytes / (
            inside * nic
        )


def test_a_group_of_one_waits_for_nothing() -> None:
    assert CLUSTERS["selene"].collective_s("all_reduce", 1e9, 1) == 0
    assert CLUSTERS["selene"].collective_s("all_gather", 1e9, 1, 8) == 0


def test_members_on_one_host_each() -> None:
    """Each of the eight groups of a host has an adapter to itself."""
    seconds = CLUSTERS["selene"].collective_s("reduce_scatter", 10e9, 64, 8)
    assert 63 / 64 * 10e9 / seconds == pytest.approx(NIC, rel=0.01)


def test_members_that_share_hosts_use_all_adapters_of_theirs() -> None:
    cluster = CLUSTERS["selene"]
    seconds = cluster.collective_s("all_gather", 10e9, 64, 1)
    assert 63 / 64 * 10e9 / seconds == pytest.approx(8 * NIC, rel=0.02)
    half = cluster.collective_s("all_gather", 10e9, 32, 2)
    assert 31 / 32 * 10e9 / half == pytest.approx(4 * NIC, rel=0.02)


def test_two_adapters_for_four_devices_are_shared() -> None:
    frontier = CLUSTERS["frontier"]
    assert frontier.device_bytes_per_s == pytest.approx(4 / 8 * 25e9 * frontier.value("network.achieved_ratio"))


def test_all_to_all_sends_each_members_own_message() -> None:
    seconds = CLUSTERS["selene"].collective_s("all_to_all", 1e9, 16, 1)
    assert seconds == pytest.approx(1e9 * 8 / 16 / NIC, rel=0.01)


def test_small_all_reduces_between_hosts_go_in_trees() -> None:
    """A ring over 512 hosts has 1,022 steps; a tree has 18."""
    network = CLUSTERS["selene"].network
    small, large = 1e4, 1e9
    ring_s = 2 * 511 * min(ring.hop_s for ring in network.rings)
    assert network.collective_s("all_reduce", small, 512, 1) < ring_s / 5
    assert network.collective_s("all_reduce", large, 512, 1) == pytest.approx(2 * 511 / 512 * large / NIC, rel=0.2)


def test_protocols_change_with_size() -> None:
    network = CLUSTERS["selene"].network
    times = [network.collective_s("all_gather", size, 64, 1) for size in (1e3, 3e7, 1e10)]
    hops = [(seconds - 63 / 64 * size / NIC) / 63 for size, seconds in zip((1e3, 3e7, 1e10), times, strict=True)]
    assert hops[0] == pytest.approx(2.7e-6, rel=0.1)
    assert hops[2] == pytest.approx(9.6e-6, rel=0.1)


def test_sends() -> None:
    cluster = CLUSTERS["selene"]
    assert cluster.send_s(1e9, 1) < cluster.send_s(1e9, 8)
    assert 1e9 / cluster.send_s(1e9, 8) == pytest.approx(NIC, rel=0.01)
    np.testing.assert_allclose(
        cluster.send_s(np.array([1e6, 1e9]), np.array([1, 64])), [cluster.send_s(1e6, 1), cluster.send_s(1e9, 64)]
    )


@given(
    rows=st.lists(
        st.tuples(BYTES, st.sampled_from((1, 2, 3, 8, 16, 24, 512)), st.sampled_from((1, 2, 8, 64))),
        min_size=1,
        max_size=5,
    ),
    kind=KINDS,
)
def test_arrays_give_what_plain_numbers_give(rows: list[tuple[float, int, int]], kind: str) -> None:
    cluster = CLUSTERS["megascale"]
    num_bytes, ranks, stride = (np.array(column) for column in zip(*rows, strict=True))
    expected = [cluster.collective_s(kind, *row) for row in rows]
    np.testing.assert_allclose(cluster.collective_s(kind, num_bytes, ranks, stride), expected, rtol=1e-9)
