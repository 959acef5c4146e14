"""The state of a host, read often and cheaply: load, memory, disks, accelerators, and the interfaces of training.

InfiniBand and RoCE ports are read below ``/sys/class/infiniband``: what goes through them by RDMA is not counted by the
network device beside them. Others are read from ``/proc/net/dev``. Counters of the kernel run since a card's driver was
loaded, for months or so, and do not simply grow: only what has come since the executor began is news.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from phalanx.checks.network_ports import is_interface_up, is_rdma_up, rdma_ports, read_counters
from phalanx.core.addresses import names_interface
from phalanx.core.host import list_folder, parse_cpu_ticks, parse_meminfo, read_number
from phalanx.run.executor.accelerator_probe import Accelerators, LastAnswer
from phalanx.run.messages import HostState, Interface

_WRAP = 1 << 32


class InterfaceBytes:
    """Bytes sent and received, since the first time that counters were read."""

    def __init__(self) -> None:
        self._bytes = 0
        self._last: dict[str, Interface] = {}

    def add(self, interfaces: Sequence[Interface]) -> int:
        """Take in counters; an interface that is new counts from now on.

        Returns:
            Bytes until now; -1: there is no interface.
        """
        for now in interfaces:
            if is_gone(now):  # what it has carried until then must not count again when it is back
                continue
            if (before := self._last.get(now.name)) is not None:
                self._bytes += grown(before.sent_bytes, now.sent_bytes)
                self._bytes += grown(before.received_bytes, now.received_bytes)
            self._last[now.name] = now
        return self._bytes if interfaces else -1


def is_gone(interface: Interface) -> bool:
    """It is not there just now, and so has no counters; they go on, or begin anew, when it is back."""
    return not (interface.is_up or interface.sent_bytes or interface.received_bytes)


def grown(before: int, now: int) -> int:
    """By how much a counter has grown that may have begun anew, or wrapped at 32 bits as old drivers' do."""
    if now >= before:
        return now - before
    wrapped = now + _WRAP - before
    return wrapped if 0 <= now < before < _WRAP and wrapped < _WRAP // 2 else max(now, 0)


_NCCL = "NCCL_SOCKET_IFNAME"
_SETTINGS = (_NCCL, "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_LOOPBACK = "lo"


@dataclass(frozen=True)
class HostInterface:
    """An interface, before it is known whether training uses it.

    Attributes:
        name: ``eth0``; of a port of an RDMA device ``mlx5_0/1``.
        device: of an RDMA port, the network device beside it, where there is one; else its name.
        rate: megabits per second; 0: not known.
    """

    name: str
    device: str
    is_rdma: bool
    is_physical: bool
    is_up: bool
    rate: int


@dataclass(frozen=True)
class ChosenInterfaces:
    """The interfaces of which the traffic tells whether training moves. `reason`: why these, for people."""

    names: tuple[str, ...]
    reason: str


def find_interfaces(sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> list[HostInterface]:
    """All interfaces that this process can see, RDMA ports first."""
    found = []
    for port in rdma_ports(sys_root):
        device = port.name.partition("/")[0]
        beside = list_folder(sys_root / "class" / "infiniband" / device / "device" / "net")
        megabits = int((port.rate_gbps or 0) * 1000)
        name = beside[0].name if beside else device
        found.append(HostInterface(port.name, name, True, True, port.is_up, megabits))
    for name in sorted(_counters(proc_root)):
        folder = sys_root / "class" / "net" / name
        is_physical, rate = (folder / "device").exists(), max(0, read_number(folder / "speed") or 0)
        found.append(HostInterface(name, name, False, is_physical, _is_up(folder), rate))
    return found


def _is_up(folder: Path) -> bool:
    return is_interface_up(folder) if folder.exists() else True  # another namespace's /sys is mounted here


def choose_interfaces(
    found: Sequence[HostInterface], *, heartbeats: str | None, wanted: Sequence[str] = (), single_host: bool = False
) -> ChosenInterfaces:
    """Choose those that training uses.

    Args:
        heartbeats: the interface by which the driver is reached; None: not known. See `interface_of`.
        wanted: names that somebody has set; a port of an RDMA device may be named by the device.
        single_host: loopback counts.
    """
    if wanted:
        names = [one.name for one in found if one.name in wanted or one.name.partition("/")[0] in wanted]
        absent = sorted(set(wanted) - {name.partition("/")[0] for name in names} - set(names))
        return ChosenInterfaces(tuple(names), "set" + (f"; absent: {', '.join(absent)}" if absent else ""))
    if single_host:
        return ChosenInterfaces(tuple(one.name for one in found if one.name == _LOOPBACK), "the job has one host")
    ports = [one for one in found if one.is_rdma and one.is_up]
    if ports:
        return _fastest([one for one in ports if one.device != heartbeats] or ports, "RDMA ports")
    up = [one for one in found if not one.is_rdma and one.is_up and one.name != _LOOPBACK]
    real = [one for one in up if one.is_physical] or up
    others = [one for one in real if one.name != heartbeats]
    if others:
        return _fastest(others, "network devices")
    if real:
        return ChosenInterfaces((real[0].name,), "the only one; it carries heartbeats too")
    return ChosenInterfaces((), "no interface is up")


def wanted_by(environ: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Which of the interfaces `names` the job's environment asks for; empty: it does not.

    The first of NCCL's, gloo's and TensorPipe's settings that is there counts. NCCL's are patterns, see
    `phalanx.core.addresses`; the others' are whole names.
    """
    variable = next((variable for variable in _SETTINGS if environ.get(variable)), _NCCL)
    pattern = environ.get(variable, "")
    return [name for name in names if names_interface(pattern, name, exact=variable != _NCCL)]


def interface_of(address: str) -> str | None:
    """The interface that has this address of the host; None: none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family in (socket.AF_INET, socket.AF_INET6) and one.address == address for one in addresses):
            return str(name)
    return None


def read_interfaces(
    names: Sequence[str], sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")
) -> list[Interface]:
    """The counters of these interfaces; one that has gone is down, with counters of 0."""
    devices = _counters(proc_root) if any("/" not in name for name in names) else {}
    found = []
    for name in names:
        device, is_port, number = name.partition("/")
        if is_port:
            folder = sys_root / "class" / "infiniband" / device / "ports" / number
            counters = read_counters(folder)
            interface = Interface(
                name=name,
                sent_bytes=counters.sent_bytes or 0,
                received_bytes=counters.received_bytes or 0,
                errors=sum(counters.errors.values()) + (counters.discards or 0),
                is_up=is_rdma_up(folder),
                flaps=counters.downs or 0,
            )
        elif columns := devices.get(name):
            folder = sys_root / "class" / "net" / name
            interface = Interface(
                name=name,
                sent_bytes=columns[8],
                received_bytes=columns[0],
                errors=columns[2] + columns[10],
                is_up=_is_up(folder),
                flaps=read_number(folder / "carrier_down_count") or 0,
            )
        else:
            interface = Interface(name=name, sent_bytes=0, received_bytes=0, is_up=False)
        found.append(interface)
    return found


def _fastest(found: Sequence[HostInterface], what: str) -> ChosenInterfaces:
    best = max(one.rate for one in found)
    chosen = tuple(one.name for one in found if one.rate == best)
    left_out = len(found) - len(chosen)
    rate = f" of {best / 1000:g} Gb/s" if best else ""
    return ChosenInterfaces(chosen, f"{what}{rate}" + (f"; {left_out} slower ones are left out" if left_out else ""))


def _counters(proc_root: Path) -> dict[str, list[int]]:
    """The columns of /proc/net/dev: received bytes, packets, errors …; from the ninth on, what was sent."""
    found = {}
    with suppress(OSError):
        for line in (proc_root / "net" / "dev").read_text().splitlines()[2:]:
            name, _, columns = line.partition(":")
            found[name.strip()] = [int(column) for column in columns.split()]
    return found


class LinkTroubles:
    """Errors and flaps of interfaces, of which those before the first reading count as nothing."""

    def __init__(self) -> None:
        self._kernel: dict[str, Interface] = {}
        self._since: dict[str, tuple[int, int]] = {}

    def since_begun(self, interfaces: Sequence[Interface]) -> list[Interface]:
        """The same interfaces with the errors and flaps that have come since they were first given."""
        found = []
        for now in interfaces:
            before, (errors, flaps) = self._kernel.get(now.name, now), self._since.get(now.name, (0, 0))
            if not is_gone(now):
                errors += grown(before.errors, now.errors)
                flaps += grown(before.flaps, now.flaps)
                self._kernel[now.name], self._since[now.name] = now, (errors, flaps)
            found.append(msgspec.structs.replace(now, errors=errors, flaps=flaps))
        return found


_DISK_S = 0.05  # the folder may be on a server that is gone


class Sensors:
    """Reads the state of this host. `folder`: where the job writes; how much is free there is reported."""

    def __init__(
        self,
        folder: Path,
        interfaces: Sequence[str],
        accelerators: Accelerators,
        *,
        proc_root: Path = Path("/proc"),
        sys_root: Path = Path("/sys"),
    ) -> None:
        self._interfaces, self._troubles = list(interfaces), LinkTroubles()
        self._accelerators = accelerators
        self._proc = proc_root
        self._sys = sys_root

        def free_bytes() -> int:
            found = os.statvfs(folder)
            return found.f_bavail * found.f_frsize  # what this user may still write

        self._disk = LastAnswer(free_bytes, f"the file system of {folder}", -1)
        self._ticks = (0, 0)

    def read(self) -> HostState:
        """The state now. ``cpu_load`` is the share of all cores that was busy since the last call, 0 to 1; what free
        disk space is not known is -1.

        Raises:
            OSError: /proc cannot be read.
        """
        ticks, load = parse_cpu_ticks((self._proc / "stat").read_text()), 0.0
        if ticks is not None:
            busy, passed = ticks[0] - self._ticks[0], ticks[1] - self._ticks[1]
            self._ticks, load = ticks, min(1.0, max(0.0, busy / passed)) if passed > 0 else 0.0
        memory = parse_meminfo((self._proc / "meminfo").read_text())
        return HostState(
            cpu_load=load,
            memory_bytes=memory["MemTotal"],
            memory_free_bytes=memory.get("MemAvailable", memory.get("MemFree", 0)),  # without swapping
            disk_free_bytes=self._disk.take(_DISK_S),
            interfaces=self._troubles.since_begun(read_interfaces(self._interfaces, self._sys, self._proc)),
            accelerators=self._accelerators.read(),
        )
