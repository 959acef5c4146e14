"""What a host says of itself: on its own /proc and /sys, on trees of real machines, and where things do not answer."""

# ruff: noqa: N802 - the names of NVML
from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.run.executor.accelerator_probe import Accelerators, DeviceUse, LastAnswer, still_held
from phalanx.run.executor.host_sensors import (
    HostInterface,
    Sensors,
    choose_interfaces,
    find_interfaces,
    interface_of,
    read_interfaces,
    wanted_by,
)
from phalanx.run.messages import HostState

linux = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
H100 = Path(__file__).parents[3] / "shared/data/nodes/gpud-kmsg/sys-class-infiniband-h100.0"
real_node = pytest.mark.skipif(not H100.exists(), reason="the tree of an H100 node is not at hand")

NO_NVML = SimpleNamespace(nvmlInit=lambda: (_ for _ in ()).throw(OSError("no driver")))


def made_roots(folder: Path) -> tuple[Path, Path]:
    """A /proc and a /sys of a host with a storage device, two fast ones, one that is down, a bridge, and loopback."""
    proc, net = folder / "proc", folder / "sys" / "class" / "net"
    (proc / "net").mkdir(parents=True)
    rows = ["Inter-|   Receive", " face |bytes"]
    for number, (name, state, speed, real) in enumerate(
        [
            ("lo", "unknown", "", False),
            ("eth0", "up", "10000", True),
            ("eth1", "up", "100000", True),
            ("eth2", "up", "100000", True),
            ("eth3", "down", "100000", True),
            ("docker0", "up", "10000", False),
        ]
    ):
        (net / name).mkdir(parents=True)
        (net / name / "operstate").write_text(state + "\n")
        (net / name / "speed").write_text(speed + "\n")
        (net / name / "carrier_down_count").write_text(f"{number}\n")
        if real:
            (net / name / "device").mkdir()
        rows.append(f"{name:>6}: {number}100 2 3 0 0 0 0 0 {number}200 5 1 0 0 0 0 0")
    (proc / "net" / "dev").write_text("\n".join(rows) + "\n")
    (proc / "stat").write_text("cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1 2 3\n")
    (proc / "meminfo").write_text("MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    400 kB\n")
    return proc, folder / "sys"


@linux
def test_this_host_says_what_it_has(tmp_path: Path) -> None:
    sensors = Sensors(tmp_path, ["lo"], Accelerators(lambda: NO_NVML))
    state = sensors.read()
    assert state.memory_bytes > state.memory_free_bytes > 0
    assert state.disk_free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.2)
    assert [one.name for one in state.interfaces] == ["lo"] and state.interfaces[0].is_up
    assert state.accelerators == []
    assert 0 <= sensors.read().cpu_load <= 1


@linux
def test_a_reading_costs_less_than_five_milliseconds_of_cpu(tmp_path: Path) -> None:
    sensors = Sensors(tmp_path, ["lo"], Accelerators(lambda: NO_NVML))
    sensors.read()
    begin_s = time.process_time()  # of CPU: a busy machine does not count
    for _ in range(100):
        sensors.read()
    assert (time.process_time() - begin_s) / 100 < 0.005


def test_load_and_memory_are_taken_from_the_columns_that_hold_them(tmp_path: Path) -> None:
    proc, sys_root = made_roots(tmp_path)
    sensors = Sensors(tmp_path, ["eth1", "gone"], Accelerators(lambda: NO_NVML), proc_root=proc, sys_root=sys_root)
    first = sensors.read()
    assert first.cpu_load == pytest.approx(0.2)
    assert (first.memory_bytes, first.memory_free_bytes) == (1024_000, 409_600)
    (proc / "stat").write_text("cpu  150 0 130 710 110 0 0 0 60 0\n")
    assert sensors.read().cpu_load == pytest.approx(0.8)
    eth1, gone = first.interfaces
    assert (eth1.received_bytes, eth1.sent_bytes, eth1.is_up) == (2100, 2200, True)
    assert (gone.name, gone.is_up) == ("gone", False)


def test_errors_and_lost_links_count_from_the_beginning_of_the_executor(tmp_path: Path) -> None:
    proc, sys_root = made_roots(tmp_path)
    device, table = sys_root / "class/net/eth1", proc / "net/dev"
    [eth1] = read_interfaces(["eth1"], sys_root, proc)
    assert (eth1.errors, eth1.flaps) == (4, 2)
    sensors = Sensors(tmp_path, ["eth1"], Accelerators(lambda: NO_NVML), proc_root=proc, sys_root=sys_root)

    def troubles() -> tuple[int, int, bool]:
        [now] = sensors.read().interfaces
        return now.errors, now.flaps, now.is_up

    assert troubles() == (0, 0, True)
    rows = table.read_text()
    table.write_text(rows.replace("eth1: 2100 2 3 ", "eth1: 2100 2 10 "))
    (device / "carrier_down_count").write_text("3\n")
    (device / "operstate").write_text("down\n")
    assert troubles() == (7, 1, False)
    table.write_text("\n".join(row for row in rows.splitlines() if "eth1" not in row) + "\n")
    assert troubles() == (7, 1, False)  # its driver is loaded anew, and counts from the beginning
    table.write_text(rows.replace("eth1: 2100 2 3 ", "eth1: 2100 2 0 ").replace("2200 5 1 ", "2200 5 0 "))
    (device / "carrier_down_count").write_text("0\n")
    (device / "operstate").write_text("up\n")
    assert troubles() == (7, 1, True)
    (device / "carrier_down_count").write_text("1\n")
    assert troubles() == (7, 2, True)


def test_training_uses_the_fastest_devices_but_the_one_that_carries_heartbeats(tmp_path: Path) -> None:
    proc, sys_root = made_roots(tmp_path)
    found = find_interfaces(sys_root, proc)
    assert {one.name for one in found if one.is_up} == {"lo", "eth0", "eth1", "eth2", "docker0"}
    choice = choose_interfaces(found, heartbeats="eth0")
    assert choice.names == ("eth1", "eth2") and "100 Gb/s" in choice.reason
    assert choose_interfaces(found, heartbeats="eth1").names == ("eth2",)
    assert choose_interfaces(found, heartbeats=None).reason.endswith("1 slower ones are left out")
    assert choose_interfaces(found, heartbeats="eth0", single_host=True).names == ("lo",)
    set_by_hand = choose_interfaces(found, heartbeats="eth0", wanted=["eth0", "ib7"])
    assert (set_by_hand.names, set_by_hand.reason) == (("eth0",), "set; absent: ib7")


def test_the_only_interface_is_used_although_it_carries_heartbeats_and_that_is_said() -> None:
    only = HostInterface("eth0", "eth0", False, True, True, 0)
    virtual = HostInterface("veth1", "veth1", False, False, True, 0)
    choice = choose_interfaces([only], heartbeats="eth0")
    assert choice.names == ("eth0",) and "carries heartbeats too" in choice.reason
    assert choose_interfaces([virtual], heartbeats=None).names == ("veth1",)  # in a network namespace
    assert choose_interfaces([], heartbeats=None).reason == "no interface is up"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth1", ["eth1"]),
        ("^eth", ["docker0"]),
        ("^=eth0", ["eth1", "docker0"]),
        ("eth0,dock", ["eth0", "docker0"]),
        ("", []),
    ],
)
def test_the_settings_of_nccl_say_what_training_uses(setting: str, expected: list[str]) -> None:
    assert wanted_by({"NCCL_SOCKET_IFNAME": setting}, ["eth0", "eth1", "docker0"]) == expected


def test_the_settings_of_gloo_are_whole_names_and_come_after_those_of_nccl() -> None:
    environ = {"NCCL_SOCKET_IFNAME": "", "GLOO_SOCKET_IFNAME": "eth1,dock", "TP_SOCKET_IFNAME": "eth0"}
    assert wanted_by(environ, ["eth0", "eth1", "docker0"]) == ["eth1"]
    assert wanted_by({**environ, "NCCL_SOCKET_IFNAME": "dock"}, ["eth0", "eth1", "docker0"]) == ["docker0"]
    assert wanted_by({}, ["eth0"]) == []


@real_node
def test_ports_of_an_h100_node_are_read_and_the_fastest_chosen(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "infiniband").symlink_to(H100)
    found = find_interfaces(tmp_path, tmp_path)
    assert len(found) == 9 and all(one.is_rdma for one in found)
    choice = choose_interfaces(found, heartbeats="eth0")
    assert choice.names == tuple(f"mlx5_{number}/1" for number in (0, 1, 4, 5, 6, 7, 8, 9))
    assert choice.reason == "RDMA ports of 400 Gb/s; 1 slower ones are left out"  # the bond of storage
    port = read_interfaces(["mlx5_0/1"], tmp_path, tmp_path)[0]
    counters = H100 / "mlx5_0/ports/1/counters"
    assert port.sent_bytes == int((counters / "port_xmit_data").read_text()) * 4 > 0
    assert port.received_bytes == int((counters / "port_rcv_data").read_text()) * 4 > 0
    assert port.flaps == int((counters / "link_downed").read_text())
    assert port.is_up


@real_node
def test_a_port_that_goes_down_is_seen(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    shutil.copytree(H100, tmp_path / "class" / "infiniband")
    ports = tmp_path / "class/infiniband/mlx5_4/ports/1"
    for path in (ports / "state", ports / "counters/link_downed"):
        path.chmod(0o644)
    (ports / "state").write_text("1: DOWN\n")
    (ports / "counters/link_downed").write_text("3\n")
    port = read_interfaces(["mlx5_4/1"], tmp_path, tmp_path)[0]
    assert not port.is_up and port.flaps == 3
    assert "mlx5_4/1" not in choose_interfaces(find_interfaces(tmp_path, tmp_path), heartbeats=None).names


@linux
def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None


# Accelerators: a driver that is played, for no test machine has to have one


class Driver:
    """What pynvml is used for, with one device."""

    NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0

    def __init__(self) -> None:
        self.used = 0
        self.pids: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def nvmlInit(self) -> None:
        self.may_answer.wait(60)

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle {index}"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self.may_answer.wait(60)
        return SimpleNamespace(total=141 << 30, used=self.used)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 61

    def nvmlDeviceGetTotalEccErrors(self, *_: object) -> int:
        raise OSError("Not Supported")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return 0x40 | 0x4

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.pids]


def test_a_device_is_described_and_what_it_does_not_know_is_left_out() -> None:
    (device,) = Accelerators(Driver).read(60)
    assert (device.name, device.memory_bytes, device.utilisation) == ("NVIDIA H200", 141 << 30, 0.5)
    assert (device.temperature_c, device.ecc_uncorrected, device.throttled) == (61.0, 0, True)


def test_a_driver_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    driver = Driver()
    accelerators = Accelerators(lambda: driver)
    assert accelerators.read(60)[0].memory_used_bytes == 0
    driver.may_answer.clear()
    driver.used = 7
    assert accelerators.read(0.01)[0].memory_used_bytes == 0  # as it was
    assert "NVML does not answer since" in accelerators._states.silence
    driver.may_answer.set()


def test_memory_is_waited_for_until_it_is_given_back() -> None:
    driver = Driver()
    accelerators = Accelerators(lambda: driver)
    accelerators.mark_idle()
    driver.used, driver.pids = 100 << 30, [77]
    assert accelerators.released({77}, 0.1) == ["NVIDIA H200 0 is held by 77"]
    driver.pids = []
    assert accelerators.released({77}, 0.1) == ["NVIDIA H200 0 has 100.00 GiB in use, 0 B when it was idle"]
    timer = threading.Timer(0.2, setattr, (driver, "used", 0))
    timer.start()
    assert accelerators.released({77}, 60) == []
    timer.join()


def test_memory_of_other_processes_is_not_waited_for() -> None:
    assert still_held([DeviceUse("A 0", 10 << 30, frozenset({5}))], [0], {77}) == []
    assert still_held([DeviceUse("A 0", 10 << 30, None)], [10 << 30], {77}) == []
    assert still_held([DeviceUse("A 0", 10 << 30, None)], [], {77}) != []


def test_where_there_is_no_driver_nothing_is_waited_for_and_the_reason_is_said() -> None:
    accelerators = Accelerators(lambda: NO_NVML)
    assert accelerators.read() == [] and accelerators.released({1}, 60) == []
    assert accelerators.absent == "no accelerators can be read: no driver"


def test_a_question_is_asked_once_until_it_is_answered() -> None:
    asked = []
    may_answer = threading.Event()

    def ask() -> int:
        asked.append(1)
        may_answer.wait(60)
        if len(asked) > 1:
            raise OSError("no more")
        return 5

    late = LastAnswer(ask, "it", 0)
    assert [late.take(0.01), late.take(0.01), late.take(60)] == [0, 0, 0]
    assert len(asked) == 1 and "it does not answer since" in late.silence
    may_answer.set()
    assert late._idle.wait(60) and late.answer == 5
    assert late.take(60) == 5 and late.silence == "it: no more"


def test_silence_for_long_a_late_answer_and_a_failure_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    may_answer = threading.Event()
    answers: list[int | OSError] = [1, OSError("no more"), OSError("no more"), 2, OSError("no more")]

    def ask() -> int:
        may_answer.wait(60)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    late = LastAnswer(ask, "the disk", 0, late_s=0.0)
    for _ in range(3):
        late.take(0.0)
    may_answer.set()
    assert late._idle.wait(60)
    for _ in range(4):
        late.take(60)
    texts = [record.getMessage().partition(" since")[0].partition(" after")[0] for record in caplog.records]
    assert texts == ["the disk does not answer", "the disk has answered", "the disk: no more", "the disk: no more"]


def test_a_state_is_what_the_driver_is_sent(tmp_path: Path) -> None:
    proc, sys_root = made_roots(tmp_path)
    state = Sensors(tmp_path, [], Accelerators(Driver), proc_root=proc, sys_root=sys_root).read()
    assert isinstance(state, HostState)
