"""Which network interfaces training uses, and their counters. Torch-free.

InfiniBand and RoCE ports are read below ``/sys/class/infiniband``: what goes through them by RDMA is not counted by the
network device beside them. Others are read from ``/proc/net/dev``.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from phalanx.checks.ports import Port, is_interface_up, is_rdma_up, rdma_ports, read_counters
from phalanx.core.interface_names import names_interface
from phalanx.core.kernel_files import list_folder, read_number
from phalanx.run.messages import Interface

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
    `phalanx.core.interface_names`; the others' are whole names.
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
