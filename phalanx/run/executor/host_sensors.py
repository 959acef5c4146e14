"""Sensors of a host: bytes and errors of the interfaces that training uses, memory, disks; read often and cheaply.

What the interfaces that training uses have carried in all, out of counters that do not simply grow.

Which network interfaces training uses, and their counters.

InfiniBand and RoCE ports are read below ``/sys/class/infiniband``: what goes through them by RDMA is not counted by the
network device beside them. Others are read from ``/proc/net/dev``.

Errors and lost links of the interfaces that training uses, since the executor began.

The kernel counts since a card's driver was loaded, for months or so: only what has come since is news.

The state of a host, read often and cheaply.
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

from phalanx.checks.network_ports import Port, is_interface_up, is_rdma_up, rdma_ports, read_counters
from phalanx.core.addresses import names_interface
from phalanx.core.host import list_folder, parse_cpu_ticks, parse_meminfo, read_number
from phalanx.run.executor.accelerator_probe import Accelerators, Late
from phalanx.run.messages import HostState, Interface

_WRAP = 1 << 32


class Carried:
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
class Found:
    """An interface, before it is known whether training uses it.

    Attributes:
        name: ``eth0``; of a port of an RDMA device ``mlx5_0/1``.
        device: of an RDMA port, the network device beside it, where there is one; else its name.
        is_rdma, is_physical, is_up: what it is.
        rate: megabits per second; 0: not known.
    """

    name: str
    device: str
    is_rdma: bool
    is_physical: bool
    is_up: bool
    rate: int


@dataclass(frozen=True)
class Choice:
    """The interfaces of which the traffic tells whether training moves.

    Attributes:
        names: of them.
        reason: why these, for people.
    """

    names: tuple[str, ...]
    reason: str


def find_interfaces(sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> list[Found]:
    """All interfaces that this process can see, RDMA ports first."""
    ports = [_rdma(port, sys_root) for port in rdma_ports(sys_root)]
    return ports + [_device(sys_root / "class" / "net" / name, name) for name in sorted(_counters(proc_root))]


def choose_interfaces(
    found: Sequence[Found], *, heartbeats: str | None, wanted: Sequence[str] = (), single_host: bool = False
) -> Choice:
    """Choose those that training uses.

    Args:
        found: from `find_interfaces`.
        heartbeats: the interface by which the driver is reached; None: not known. See `interface_of`.
        wanted: names that somebody has set; a port of an RDMA device may be named by the device.
        single_host: loopback counts.
    """
    if wanted:
        names = [one.name for one in found if one.name in wanted or one.name.partition("/")[0] in wanted]
        absent = sorted(set(wanted) - {name.partition("/")[0] for name in names} - set(names))
        return Choice(tuple(names), "set" + (f"; absent: {', '.join(absent)}" if absent else ""))
    if single_host:
        return Choice(tuple(one.name for one in found if one.name == _LOOPBACK), "the job has one host")
    ports = [one for one in found if one.is_rdma and one.is_up]
    if ports:
        return _fastest([one for one in ports if one.device != heartbeats] or ports, "RDMA ports")
    up = [one for one in found if not one.is_rdma and one.is_up and one.name != _LOOPBACK]
    real = [one for one in up if one.is_physical] or up
    others = [one for one in real if one.name != heartbeats]
    if others:
        return _fastest(others, "network devices")
    if real:
        return Choice((real[0].name,), "the only one; it carries heartbeats too")
    return Choice((), "no interface is up")


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
    counters = _counters(proc_root) if any("/" not in name for name in names) else {}
    return [
        _read_port(name, sys_root) if "/" in name else _read_device(name, counters.get(name), sys_root)
        for name in names
    ]


def _fastest(found: Sequence[Found], what: str) -> Choice:
    best = max(one.rate for one in found)
    chosen = tuple(one.name for one in found if one.rate == best)
    left_out = len(found) - len(chosen)
    rate = f" of {best / 1000:g} Gb/s" if best else ""
    return Choice(chosen, f"{what}{rate}" + (f"; {left_out} slower ones are left out" if left_out else ""))


def _rdma(port: Port, sys_root: Path) -> Found:
    device = port.name.partition("/")[0]
    beside = list_folder(sys_root / "class" / "infiniband" / device / "device" / "net")
    megabits = int((port.rate_gbps or 0) * 1000)
    return Found(port.name, beside[0].name if beside else device, True, True, port.is_up, megabits)


def _device(folder: Path, name: str) -> Found:
    is_up = is_interface_up(folder) if folder.exists() else True  # another namespace's /sys is mounted here
    return Found(name, name, False, (folder / "device").exists(), is_up, max(0, _number(folder / "speed")))


def _read_port(name: str, sys_root: Path) -> Interface:
    device, _, number = name.partition("/")
    folder = sys_root / "class" / "infiniband" / device / "ports" / number
    counters = read_counters(folder)
    return Interface(
        name=name,
        sent_bytes=counters.sent_bytes or 0,
        received_bytes=counters.received_bytes or 0,
        errors=sum(counters.errors.values()) + (counters.discards or 0),
        is_up=is_rdma_up(folder),
        flaps=counters.downs or 0,
    )


def _read_device(name: str, counters: Sequence[int] | None, sys_root: Path) -> Interface:
    if counters is None:
        return Interface(name=name, sent_bytes=0, received_bytes=0, is_up=False)
    folder = sys_root / "class" / "net" / name
    return Interface(
        name=name,
        sent_bytes=counters[8],
        received_bytes=counters[0],
        errors=counters[2] + counters[10],
        is_up=is_interface_up(folder) if folder.exists() else True,
        flaps=_number(folder / "carrier_down_count"),
    )


def _counters(proc_root: Path) -> dict[str, list[int]]:
    """The columns of /proc/net/dev: received bytes, packets, errors …; from the ninth on, what was sent."""
    found = {}
    with suppress(OSError):
        for line in (proc_root / "net" / "dev").read_text().splitlines()[2:]:
            name, _, columns = line.partition(":")
            found[name.strip()] = [int(column) for column in columns.split()]
    return found


def _number(path: Path) -> int:
    return read_number(path) or 0


class LinkTroubles:
    """Counters of the kernel, of which the first that are read count as nothing."""

    def __init__(self) -> None:
        self._kernel: dict[str, Interface] = {}
        self._since: dict[str, tuple[int, int]] = {}

    def since_begun(self, interfaces: Sequence[Interface]) -> list[Interface]:
        """The same interfaces with the errors and flaps that have come since they were first given."""
        return [self._renewed(interface) for interface in interfaces]

    def _renewed(self, now: Interface) -> Interface:
        before, (errors, flaps) = self._kernel.get(now.name, now), self._since.get(now.name, (0, 0))
        if not is_gone(now):
            errors += grown(before.errors, now.errors)
            flaps += grown(before.flaps, now.flaps)
            self._kernel[now.name], self._since[now.name] = now, (errors, flaps)
        return msgspec.structs.replace(now, errors=errors, flaps=flaps)


_DISK_S = 0.05  # the folder may be on a server that is gone


class Sensors:
    """Reads the state of this host.

    Args:
        folder: where the job writes; how much is free there is reported.
        interfaces: names, from `phalanx.run.executor.host_sensors.choose_interfaces`.
        accelerators: of the host.
        proc_root, sys_root: where /proc and /sys are.
    """

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
        self._disk = Late(lambda: _free_bytes(folder), f"the file system of {folder}", -1)
        self._ticks = (0, 0)

    def read(self) -> HostState:
        """The state now. ``cpu_load`` is the share of all cores that was busy since the last call, 0 to 1; what free
        disk space is not known is -1.

        Raises:
            OSError: /proc cannot be read.
        """
        total_bytes, free_bytes = self._memory()
        return HostState(
            cpu_load=self._load(),
            memory_bytes=total_bytes,
            memory_free_bytes=free_bytes,
            disk_free_bytes=self._disk.take(_DISK_S),
            interfaces=self._troubles.since_begun(read_interfaces(self._interfaces, self._sys, self._proc)),
            accelerators=self._accelerators.read(),
        )

    def _load(self) -> float:
        ticks = parse_cpu_ticks((self._proc / "stat").read_text())
        if ticks is None:
            return 0.0
        before, self._ticks = self._ticks, ticks
        busy, passed = ticks[0] - before[0], ticks[1] - before[1]
        return min(1.0, max(0.0, busy / passed)) if passed > 0 else 0.0

    def _memory(self) -> tuple[int, int]:
        """Bytes of all memory, and of what can be had without swapping."""
        found = parse_meminfo((self._proc / "meminfo").read_text())
        return found["MemTotal"], found.get("MemAvailable", found.get("MemFree", 0))


def _free_bytes(folder: Path) -> int:
    """What this user may still write."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
