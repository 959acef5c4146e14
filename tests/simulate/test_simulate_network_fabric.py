"""A CLOS fabric against its published sizes, and paths against what links connect."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.simulate.fabric import Fabric, Hashing, choose_paths, link_bytes
from phalanx.simulate.traffic import Flows, Phase, make_flows

MEGASCALE = Fabric(hosts=1536, nics_per_host=8, nic_bytes_per_s=25e9, port_bytes_per_s=50e9)


def random_flows(fabric: Fabric, count: int, seed: int = 0) -> Flows:
    rng = np.random.default_rng(seed)
    hosts = rng.integers(0, fabric.hosts, (2, count))
    nics = rng.integers(0, fabric.nics_per_host, (2, count))
    groups = np.arange(count)
    return Flows(hosts[0], nics[0], hosts[1], nics[1], rng.uniform(1, 9, count), groups)


@st.composite
def fabrics(draw: st.DrawFn) -> Fabric:
    """Three layers of random switches; those that have no room for their hosts are drawn anew."""
    try:
        return Fabric(
            hosts=draw(st.integers(1, 300)),
            nics_per_host=draw(st.sampled_from([1, 2, 4])),
            nic_bytes_per_s=draw(st.sampled_from([1.0, 2.0])),
            port_bytes_per_s=2.0,
            radix=draw(st.sampled_from([16, 32])),
            layers=3,
            rail_optimised=draw(st.booleans()),
            uplink_split=draw(st.sampled_from([1, 2])),
            tor_oversubscription=draw(st.sampled_from([1.0, 2.0])),
            aggregation_oversubscription=draw(st.sampled_from([1.0, 4.0])),
        )
    except UserError:
        reject()


def test_megascale_has_the_sizes_of_its_paper() -> None:
    # Section 3.6: 64 x 400G, 32 down and 32 up, 400G down split into 2 x 200G, 8 NICs to 8 ToRs, 64 servers per group.
    assert MEGASCALE.nics_per_tor == MEGASCALE.hosts_per_group == 64
    assert MEGASCALE.tors_per_group == 8
    assert MEGASCALE.tor_uplinks == 32
    assert MEGASCALE.uplink_bytes_per_s == 2 * MEGASCALE.nic_bytes_per_s
    assert MEGASCALE.groups == 24
    assert MEGASCALE.pods == 6


@pytest.mark.parametrize("rails", [True, False])
def test_a_fabric_without_oversubscription_has_as_much_bandwidth_up_as_down(rails: bool) -> None:
    fabric = MEGASCALE.changed(rail_optimised=rails)
    down = fabric.nics_per_tor * fabric.nic_bytes_per_s
    assert fabric.tor_uplinks * fabric.uplink_bytes_per_s == down
    assert fabric.aggregation_uplinks == fabric.groups_per_pod * fabric.tors_per_group == 32
    assert fabric.changed(tor_oversubscription=2.0).tor_uplinks == 16


def test_uplinks_of_half_the_speed_are_twice_as_many() -> None:
    split = MEGASCALE.changed(uplink_split=2)
    assert split.tor_uplinks == 64
    assert split.uplink_bytes_per_s == MEGASCALE.nic_bytes_per_s


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hosts": 0}, "hosts"),
        ({"layers": 4}, "layers"),
        ({"radix": 63}, "radix"),
        ({"nic_bytes_per_s": 60e9}, "nic_bytes_per_s"),
        ({"nic_bytes_per_s": float("nan")}, "nic_bytes_per_s"),
        ({"tor_oversubscription": 0.0}, "tor_oversubscription"),
        ({"tor_oversubscription": 100.0}, "tor_oversubscription"),
        ({"layers": 2}, "hosts"),  # 192 ToRs at switches of 64 ports
        ({"hosts": 64 * 64 * 4 + 1}, "hosts"),
        ({"radix": 4, "rail_optimised": False}, "radix"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_cure(changes: dict[str, object], field: str) -> None:
    with pytest.raises(UserError) as caught:
        MEGASCALE.changed(**changes)
    assert caught.value.field == field
    assert caught.value.cure


def test_two_layers_reach_as_many_hosts_as_their_spines_have_ports() -> None:
    small = MEGASCALE.changed(hosts=512, layers=2)
    assert (small.pods, small.aggregation_uplinks, small.tors) == (1, 0, 64)
    paths = choose_paths(small, random_flows(small, 500), "ecmp", 1, 0)
    assert (paths[:, 2:4] == -1).all()


@given(fabrics(), st.sampled_from(["ecmp", "polarised", "adaptive"]), st.integers(0, 5))
def test_paths_lead_from_sender_to_receiver(fabric: Fabric, hashing: Hashing, seed: int) -> None:
    flows = random_flows(fabric, 60, seed)
    paths = choose_paths(fabric, flows, hashing, 1, seed)
    up, above, first = fabric.tor_uplinks, fabric.aggregation_uplinks, fabric.offsets
    source = fabric.tor_of(flows.source_host, flows.source_nic)
    target = fabric.tor_of(flows.target_host, flows.target_nic)
    for number, path in enumerate(paths):
        assert path[0] == flows.source_host[number] * fabric.nics_per_host + flows.source_nic[number]
        assert path[5] - first[1] == flows.target_host[number] * fabric.nics_per_host + flows.target_nic[number]
        if source[number] == target[number]:
            assert (path[1:5] == -1).all()
            continue
        tor, plane = divmod(path[1] - first[2], up)
        assert tor == source[number]
        assert divmod(path[4] - first[3], up) == (target[number], plane)  # down over the same plane
        pods = fabric.pod_of(source[number]), fabric.pod_of(target[number])
        if pods[0] == pods[1]:
            assert (path[2:4] == -1).all()
        else:
            (one, core), (other, same) = (divmod(path[hop] - first[kind], above) for hop, kind in ((2, 4), (3, 5)))
            assert (one, other, core) == (pods[0] * up + plane, pods[1] * up + plane, same)


@given(fabrics(), st.sampled_from(["ecmp", "adaptive", "ideal"]), st.integers(1, 3))
def test_no_byte_is_lost_at_any_switch(fabric: Fabric, hashing: Hashing, pairs: int) -> None:
    flows = random_flows(fabric, 80)
    loads = link_bytes(fabric, flows, hashing, pairs, seed=3)
    kinds = [loads[a:b].sum() for a, b in zip(fabric.offsets[:-1], fabric.offsets[1:], strict=True)]
    total = flows.num_bytes.sum()
    source = fabric.tor_of(flows.source_host, flows.source_nic)
    target = fabric.tor_of(flows.target_host, flows.target_nic)
    crossing = flows.num_bytes[source != target].sum()
    leaving = flows.num_bytes[fabric.pod_of(source) != fabric.pod_of(target)].sum()
    assert kinds == pytest.approx([total, total, crossing, crossing, leaving, leaving])
    # What comes into a ToR from above and its NICs leaves it again, switch by switch.
    nics = np.arange(fabric.num_nics)
    tor = fabric.tor_of(nics // fabric.nics_per_host, nics % fabric.nics_per_host)
    first = fabric.offsets
    into = np.bincount(tor, weights=loads[: first[1]], minlength=fabric.tors)
    out = np.bincount(tor, weights=loads[first[1] : first[2]], minlength=fabric.tors)
    above = loads[first[2] : first[3]].reshape(fabric.tors, -1).sum(axis=1)
    below = loads[first[3] : first[4]].reshape(fabric.tors, -1).sum(axis=1)
    assert into + below == pytest.approx(out + above)


def test_adaptive_switches_have_equally_many_connections_on_all_uplinks() -> None:
    flows = random_flows(MEGASCALE, 5000)
    paths = choose_paths(MEGASCALE, flows, "adaptive", 2, 0)
    first = MEGASCALE.offsets
    taken = paths[:, 1][paths[:, 1] >= 0] - first[2]
    counts = np.bincount(taken, minlength=first[3] - first[2]).reshape(-1, MEGASCALE.tor_uplinks)
    assert (counts.max(axis=1) - counts.min(axis=1)).max() <= 1


def test_switches_that_hash_alike_use_few_of_their_uplinks() -> None:
    flows = random_flows(MEGASCALE, 20_000)
    first, above = MEGASCALE.offsets, MEGASCALE.aggregation_uplinks
    used = {}
    for hashing in ("ecmp", "polarised"):
        paths = choose_paths(MEGASCALE, flows, hashing, 1, 0)
        links = np.unique(paths[:, 2][paths[:, 2] >= 0]) - first[4]
        used[hashing] = len(links) / len(np.unique(links // above))
    assert used["ecmp"] > 0.9 * above
    assert used["polarised"] == 1.0  # each aggregation switch sees hashes of one value only


def test_hashes_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    flows = random_flows(MEGASCALE, 300)
    again = choose_paths(MEGASCALE, flows, "ecmp", 4, 7)
    assert (choose_paths(MEGASCALE, flows, "ecmp", 4, 7) == again).all()
    assert (choose_paths(MEGASCALE, flows, "ecmp", 4, 8) != again).any()


def test_a_ring_stays_below_its_tors_but_for_one_hop_in_each_group() -> None:
    """MegaScale 3.6 and 2: data-parallel groups are built first, so that they cross few links between pods."""
    flows = make_flows(Phase("data", "ring", 192, 8, 1.0), 12288, 8, 8)
    source = MEGASCALE.tor_of(flows.source_host, flows.source_nic)
    crossing = source != MEGASCALE.tor_of(flows.target_host, flows.target_nic)
    assert len(flows) == 12288
    assert crossing.sum() == 64 * 3  # 64 rings over three groups of 64 hosts


def test_members_that_share_a_host_share_the_bytes_of_its_hop() -> None:
    flows = make_flows(Phase("data", "ring", 16, 2, 10.0), 64, 8, 8)  # four members in each of four hosts
    assert len(flows) == 64
    assert set(flows.num_bytes) == {2.5}
    leaving = np.bincount(flows.source_host, weights=flows.num_bytes)
    assert leaving.tolist() == [20.0] * 8  # two groups on each host, ten bytes each


@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8]))
def test_all_to_all_sends_everything_but_what_stays_in_the_host(ranks: int, stride: int, per_host: int) -> None:
    devices = ranks * stride * per_host
    flows = make_flows(Phase("expert", "all_to_all", ranks, stride, 1.0), devices, per_host, per_host)
    inside = min(ranks, max(1, per_host // stride))
    assert flows.num_bytes.sum() == pytest.approx(devices * (ranks - inside) / (ranks - 1))


def test_neighbours_send_both_ways() -> None:
    flows = make_flows(Phase("pipeline", "neighbours", 4, 8, 5.0), 32, 8, 8)
    assert len(flows) == 64
    pairs = set(zip(flows.source_host.tolist(), flows.target_host.tolist(), strict=True))
    assert pairs == {(a, (a + step) % 4) for a in range(4) for step in (1, 3)}


def test_incast_has_one_receiver() -> None:
    flows = make_flows(Phase("load", "incast", 16, 8, 5.0), 128, 8, 8)
    assert len(flows) == 8 * 15
    assert set(flows.target_host) == {0}
