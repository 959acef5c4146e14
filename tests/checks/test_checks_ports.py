"""Network cards: recorded trees of real machines, and faults put into them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from checks_helpers import add_rdma, empty_host, recorded, snapshot_tree, write_tree

from phalanx.checks import nic
from phalanx.checks.check_host import Host
from phalanx.checks.network_ports import (
    Port,
    is_interface_up,
    is_named,
    net_ports,
    rdma_ports,
    read_counters,
    read_ports,
)

_BOOT = "sys/kernel/random/boot_id"


@pytest.fixture
def h100(tmp_path: Path) -> Host:
    """The RDMA devices of a real H100 node."""
    shutil.copytree(recorded("gpud-kmsg/sys-class-infiniband-h100.0"), tmp_path / "sys/class/infiniband")
    for path in tmp_path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return empty_host(tmp_path)


def _write(host: Host, port: str, content: str) -> None:
    (host.sys / "class/infiniband" / port).write_text(content + "\n")


def test_a_real_node_is_read(h100: Host) -> None:
    ports = {port.name: port for port in rdma_ports(h100.sys)}
    assert len(ports) == 9
    assert all(port.is_up for port in ports.values())
    assert ports["mlx5_0/1"].rate_gbps == 400
    assert ports["mlx5_bond_0/1"].rate_gbps == 200
    assert ports["mlx5_1/1"].downs == 255
    assert "mlx5_1/1 cannot count further" in nic.check_flaps(h100).reason
    assert ports["mlx5_1/1"].errors["port_rcv_errors"] == 14
    assert nic.check_link(h100).value == 9
    # The bond runs at half the rate, but it is another kind of link.
    assert nic.check_rate(h100).outcome == "pass"


def test_counters_of_a_real_port_are_told_in_bytes(h100: Host) -> None:
    folder = h100.sys / "class/infiniband/mlx5_0/ports/1"
    counters = read_counters(folder)
    assert counters.sent_bytes == int((folder / "counters/port_xmit_data").read_text()) * 4 > 0
    assert counters.received_bytes == int((folder / "counters/port_rcv_data").read_text()) * 4 > 0
    assert counters.discards == int((folder / "counters/port_xmit_discards").read_text())
    (port,) = (port for port in rdma_ports(h100.sys) if port.name == "mlx5_0/1")
    assert (port.received_bits, port.errors) == (counters.received_bytes * 8, counters.errors)
    nothing = read_counters(h100.sys / "nothing")
    assert (nothing.sent_bytes, nothing.downs, nothing.errors) == (None, None, {})


@pytest.mark.parametrize(
    ("state", "carrier", "is_up"),
    [
        ("up", "1", True),
        ("unknown", "1", True),
        ("unknown", "", True),
        ("unknown", "0", False),
        ("dormant", "1", False),
        ("down", "0", False),
    ],
)
def test_an_interface_is_up_when_data_can_pass(tmp_path: Path, state: str, carrier: str, is_up: bool) -> None:
    write_tree(tmp_path, {"operstate": state, "carrier": carrier})
    assert is_interface_up(tmp_path) is is_up


def test_a_port_that_went_down_is_named(h100: Host) -> None:
    assert nic.check_link(h100).outcome == "pass"
    _write(h100, "mlx5_4/ports/1/state", "1: DOWN")
    _write(h100, "mlx5_4/ports/1/phys_state", "2: Polling")
    result = nic.check_link(h100)
    assert result.outcome == "fail"
    assert "mlx5_4/1 is down and was up at an earlier check" in result.reason
    assert result.value == 8
    assert "cable" in result.action


def test_a_card_that_vanished_is_named(h100: Host) -> None:
    nic.check_link(h100)
    shutil.rmtree(h100.sys / "class/infiniband/mlx5_9")
    assert "mlx5_9/1 is gone" in nic.check_link(h100).reason


def test_ports_never_seen_up_are_not_judged(tmp_path: Path) -> None:
    add_rdma(tmp_path / "sys", "mlx5_0")
    add_rdma(tmp_path / "sys", "mlx5_1", state="1: DOWN", physical="2: Polling")
    host = empty_host(tmp_path)
    result = nic.check_link(host)
    assert result.outcome == "pass"
    assert "not judged" in result.reason
    named = replace(host, environment={"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}, cache=tmp_path / "other")
    assert "mlx5_1/1 is down and named for training" in nic.check_link(named).reason
    expecting = replace(host, expected={"nic-link": 2.0}, cache=tmp_path / "third")
    assert nic.check_link(expecting).outcome == "fail"


def test_a_port_somebody_switched_off_is_left_alone(tmp_path: Path) -> None:
    add_rdma(tmp_path / "sys", "mlx5_0", state="1: DOWN", physical="3: Disabled")
    host = empty_host(tmp_path, environment={"NCCL_IB_HCA": "mlx5"})
    assert nic.check_link(host).outcome == "pass"


def test_no_card_skips(tmp_path: Path) -> None:
    host = empty_host(tmp_path)
    for check in (nic.LINK, nic.RATE, nic.FLAPS, nic.ERRORS):
        result = check.run(host)
        assert (result.outcome, bool(result.reason)) == ("skip", True)


@pytest.mark.parametrize(
    ("snapshot", "outcome", "told"),
    [
        ("learn_good", "pass", ""),
        ("learn_ib_intf_operstate_down", "fail", "ib4 is down and went down 49 times"),
        ("learn_stuck_ib_intf", "fail", "mlx5_6/1 has a link but stays in state INIT"),
    ],
)
def test_good_and_bad_nodes(tmp_path: Path, snapshot: str, outcome: str, told: str) -> None:
    result = nic.check_link(empty_host(tmp_path, sys=snapshot_tree(snapshot, tmp_path / "sys")))
    assert result.outcome == outcome
    assert told in result.reason


def test_every_port_at_half_the_rate_is_seen_against_what_was_before(tmp_path: Path) -> None:
    good = empty_host(tmp_path, sys=snapshot_tree("learn_good", tmp_path / "good"))
    slow = empty_host(tmp_path, sys=snapshot_tree("learn_ib_intf_bad_rate", tmp_path / "slow"))
    assert nic.check_rate(good).outcome == "pass"
    result = nic.check_rate(slow)
    assert result.outcome == "fail"
    assert (result.value, result.threshold, result.threshold_source) == (100.0, 200.0, "this port at an earlier check")
    # And with nothing known of before, against what the user expects.
    fresh = replace(slow, cache=tmp_path / "fresh", expected={"nic-rate": 200.0})
    assert nic.check_rate(fresh).threshold_source == "given with --expect"
    assert nic.check_rate(fresh).outcome == "fail"


def test_one_slow_port_is_seen_against_its_like(h100: Host) -> None:
    _write(h100, "mlx5_7/ports/1/rate", "200 Gb/sec (2X NDR)")
    result = nic.check_rate(h100)
    assert result.outcome == "fail"
    assert result.reason.startswith("mlx5_7/1: ")
    assert "8 ports of its kind" in result.threshold_source


class _Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def flapping(tmp_path: Path, clock: _Clock) -> Host:
    write_tree(tmp_path / "proc", {_BOOT: "boot-1"})
    add_rdma(tmp_path / "sys", "mlx5_0", link_downed=5)
    return empty_host(tmp_path, unix_s=clock)


def _downs(host: Host, count: int) -> None:
    (host.sys / "class/infiniband/mlx5_0/ports/1/counters/link_downed").write_text(str(count))


def test_flaps_stay_for_a_window_and_go(flapping: Host, clock: _Clock) -> None:
    assert nic.check_flaps(flapping).outcome == "pass"  # 5 since the boot, nobody knows when
    clock.now += 60
    _downs(flapping, 6)
    assert nic.check_flaps(flapping).outcome == "pass"  # one
    clock.now += 60
    _downs(flapping, 7)
    result = nic.check_flaps(flapping)
    assert result.outcome == "fail"
    assert (result.value, result.threshold) == (2.0, 2.0)
    assert "mlx5_0/1 went down 2 times; clears in 1h00m" in result.reason
    clock.now += nic.WINDOW_S / 2
    assert nic.check_flaps(flapping).outcome == "fail"  # quiet since, but too short
    clock.now += nic.WINDOW_S / 2
    assert nic.check_flaps(flapping).outcome == "pass"


def test_a_reboot_and_a_long_gap_are_no_flaps(flapping: Host, clock: _Clock) -> None:
    nic.check_flaps(flapping)
    write_tree(flapping.proc, {_BOOT: "boot-2"})
    _downs(flapping, 3)
    clock.now += 60
    assert nic.check_flaps(flapping).outcome == "pass"
    clock.now += nic.LONGEST_GAP_S + 1
    _downs(flapping, 30)
    assert nic.check_flaps(flapping).outcome == "pass"


def test_what_is_remembered_may_be_lost_or_damaged(flapping: Host) -> None:
    nic.check_flaps(flapping)
    (flapping.cache / "nic-flaps.json").write_text('{"torn')
    assert nic.check_flaps(flapping).outcome == "pass"


def _count(host: Host, errors: int, words: int) -> None:
    folder = host.sys / "class/infiniband/mlx5_0/ports/1/counters"
    (folder / "symbol_error").write_text(str(errors))
    (folder / "port_rcv_data").write_text(str(words))


def test_error_counters_are_rates(tmp_path: Path) -> None:
    write_tree(tmp_path / "proc", {_BOOT: "boot-1"})
    add_rdma(tmp_path / "sys", "mlx5_0", symbol_error=1000, port_rcv_data=10**9)
    host = empty_host(tmp_path)
    first = nic.check_errors(host)
    assert first.outcome == "pass"
    assert "a rate needs a second one" in first.reason
    _count(host, 1009, 2 * 10**9)  # fewer than ten: chance
    assert nic.check_errors(host).outcome == "pass"
    _count(host, 1109, 3 * 10**9)
    bad = nic.check_errors(host)
    assert bad.outcome == "fail"
    assert bad.value == pytest.approx(100 / (10**9 * 32))
    assert "mlx5_0/1: 100 errors" in bad.reason
    _count(host, 1209, 3 * 10**9 + 10**14)  # as many, but in a hundred thousand times the data
    assert nic.check_errors(host).outcome == "pass"


def test_interfaces_of_the_same_name_in_other_namespaces_are_others(tmp_path: Path) -> None:
    """Executors of one host may each have a network namespace, and remember in the same folder."""
    for name, address, downs in (("a", "02:00:00:00:00:01", 1), ("b", "02:00:00:00:00:02", 9)):
        eth0 = {"operstate": "up", "address": address, "carrier_down_count": downs, "device/vendor": "x", "type": 1}
        write_tree(tmp_path / name / "sys/class/net/eth0", eth0)
    hosts = [empty_host(tmp_path / name, cache=tmp_path / "cache", unix_s=_Clock()) for name in ("a", "b", "a", "b")]
    for host in hosts:
        assert nic.check_link(host).outcome == "pass"
        assert nic.check_flaps(host).outcome == "pass"
        assert nic.check_flaps(host).value == 0.0


def test_interfaces_of_hardware_and_named_ones(tmp_path: Path) -> None:
    net = tmp_path / "sys/class/net"
    write_tree(net, {"eth0/operstate": "up", "eth0/speed": 100000, "eth0/device/vendor": "0x15b3", "eth0/type": 1})
    write_tree(net, {"veth1/operstate": "down", "veth1/flags": "0x1003", "docker0/operstate": "up"})
    assert [port.name for port in net_ports(tmp_path / "sys")] == ["eth0"]
    host = empty_host(tmp_path, environment={"GLOO_SOCKET_IFNAME": "veth1"})
    assert [port.name for port in read_ports(host)] == ["eth0", "veth1"]
    assert "veth1 is down and named" in nic.check_link(host).reason
    write_tree(net, {"veth1/flags": "0x1002"})
    assert nic.check_link(host).outcome == "pass"


@pytest.mark.parametrize(
    ("devices", "named"),
    [
        ("mlx5", True),
        ("=mlx5", False),
        ("=mlx5_1", True),
        ("=mlx5_1:2", False),
        ("mlx5_1:1", True),
        ("^mlx5_1", False),
        ("", False),
    ],
)
def test_devices_that_nccl_is_told_to_use(devices: str, named: bool) -> None:
    assert is_named(Port("mlx5_1/1", "InfiniBand", True), {"NCCL_IB_HCA": devices}) is named
