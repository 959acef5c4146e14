"""The network interface that replicas go through: a table of facts in, one of them out."""

from __future__ import annotations

import pytest

from phalanx.checkpoint.replicas.replica_routes import LOOPBACK, Interface, choose, interfaces_here, network
from phalanx.core.errors import UserError

GIGABIT = 10**9
LO = Interface("lo", ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", ("10.0.0.1",), True, GIGABIT)
ETH1 = Interface("eth1", ("10.1.0.1",), True, 100 * GIGABIT)
ETH2 = Interface("eth2", ("10.2.0.1",))
IB0 = Interface("ib0", ("10.3.0.1",))
SLOW_IB = Interface("ib1", ("10.4.0.1",), True, 40 * GIGABIT)
DOWN = Interface("eth9", ("10.9.0.1",), False, 400 * GIGABIT)
BARE = Interface("eth8", (), True, 400 * GIGABIT)
DOCKER = Interface("docker0", ("172.17.0.1",), True, 10 * GIGABIT)
VETH = Interface("veth12ab", ("172.17.0.2",), True, 10 * GIGABIT)


@pytest.mark.parametrize(
    ("interfaces", "chosen"),
    [
        ([LO, ETH0], "eth0"),
        ([ETH0, ETH1, ETH2], "eth1"),
        ([ETH2, ETH0], "eth0"),
        ([ETH0, DOWN, BARE], "eth0"),
        ([DOCKER, ETH2, VETH], "eth2"),
        ([LO, VETH, DOCKER], "docker0"),
        ([ETH1, IB0], "ib0"),
        ([ETH1, SLOW_IB], "eth1"),
        ([Interface("aa", ("10.5.0.1",), True, 40 * GIGABIT), SLOW_IB], "ib1"),
    ],
)
def test_the_fastest_real_one_is_chosen_in_any_order(interfaces: list[Interface], chosen: str) -> None:
    assert choose(interfaces, {}).interface == chosen
    assert choose(interfaces[::-1], {}).interface == chosen


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({"PHALANX_INTERFACE": "eth0"}, "eth0"),
        ({"PHALANX_INTERFACE": "eth"}, "eth1"),
        ({"PHALANX_INTERFACE": "=eth0"}, "eth0"),
        ({"PHALANX_INTERFACE": "=eth2,eth0"}, "eth0"),
        ({"PHALANX_INTERFACE": "^ib,eth1"}, "eth0"),
        ({"PHALANX_INTERFACE": "^=ib0"}, "eth1"),
        ({"PHALANX_INTERFACE": "docker"}, "docker0"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "eth1"),
        ({"NCCL_SOCKET_IFNAME": "^ib"}, "eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth0, eth2"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "ib0"),  # whole names: there is no eth
        ({"NCCL_SOCKET_IFNAME": "hsn"}, "ib0"),
        ({"NCCL_SOCKET_IFNAME": "hsn", "GLOO_SOCKET_IFNAME": "eth0"}, "eth0"),
        ({"PHALANX_INTERFACE": "eth0", "NCCL_SOCKET_IFNAME": "ib"}, "eth0"),
        ({"PHALANX_INTERFACE": ""}, "ib0"),
    ],
)
def test_what_the_environment_names_comes_first(environment: dict[str, str], chosen: str) -> None:
    assert choose([LO, ETH0, ETH1, ETH2, IB0, DOCKER], environment).interface == chosen


def test_it_says_why_and_how_fast() -> None:
    assert choose([ETH0, ETH1], {}).why == "the fastest known, 100 Gbit/s"
    assert choose([ETH2], {"NCCL_SOCKET_IFNAME": "hsn"}).why == (
        "NCCL_SOCKET_IFNAME=hsn matches none of eth2; the fastest known, of unknown speed"
    )


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match=r"PHALANX_INTERFACE = 'eth7': .*; name one of: lo, eth0, eth1"):
        choose([LO, ETH0, ETH1, DOWN], {"PHALANX_INTERFACE": "eth7"})


def test_loopback_is_chosen_where_it_is_named_or_nothing_else_is_there() -> None:
    assert choose([LO, ETH0], {"PHALANX_INTERFACE": "lo"}).addresses == ("127.0.0.1", "::1")
    assert choose([LO, ETH0], {"PHALANX_INTERFACE": "^docker"}).interface == "eth0"
    assert choose([LO, ETH0], {"NCCL_SOCKET_IFNAME": "lo"}).interface == "eth0"
    alone = choose([LO, DOWN, BARE], {})
    assert alone.addresses == LOOPBACK.addresses
    assert "no other host can come" in alone.why


def test_one_host_stays_on_loopback_whatever_the_environment_says() -> None:
    assert network(1, {"PHALANX_INTERFACE": "nothing"}) == LOOPBACK
    assert LOOPBACK.endpoint("a", 7).addresses == ("127.0.0.1",)


def test_the_table_of_this_host_has_loopback_and_only_addresses_that_others_can_use() -> None:
    table = interfaces_here()
    assert any(each.is_loopback for each in table)
    assert not any(address.startswith("fe80") for each in table for address in each.addresses)
    assert all(each.bits_per_s is None or each.bits_per_s > 0 for each in table)
