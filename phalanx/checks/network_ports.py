"""Ports of network cards as the kernel shows them: RDMA devices and network interfaces.

See Documentation/ABI/stable/sysfs-class-infiniband and Documentation/ABI/testing/sysfs-class-net of Linux.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.checks.check_host import Host
from phalanx.core.host import list_folder, read_number, read_text

_RDMA_ERRORS = (
    "symbol_error",
    "port_rcv_errors",
    "link_error_recovery",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_NET_ERRORS = ("rx_errors", "tx_errors")
_IFF_UP = 1
_WORD_BYTES = 4  # InfiniBand counts data in words


@dataclass(frozen=True)
class Port:
    """One port.

    Attributes:
        name: ``mlx5_0/1`` of an RDMA device, ``eth0`` of an interface.
        kind: ports of one kind are expected to run at one rate.
        is_up: data can pass.
        is_off: somebody switched it off.
        stuck: the cable is fine, but the port was not brought up: in which state it is instead.
        downs: how often the link went down, as long as the kernel has counted.
        ups: how often it came up; None: not known.
        errors: counters.
        received_bits: as long as the kernel has counted.
    """

    name: str
    kind: str
    is_up: bool
    address: str = ""
    is_off: bool = False
    stuck: str = ""
    rate_gbps: float | None = None
    downs: int | None = None
    ups: int | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    received_bits: int | None = None

    @property
    def identity(self) -> str:
        """What is remembered of a port belongs to: every network namespace of a host may have an ``eth0``."""
        return f"{self.name} {self.address}".strip()

    @property
    def is_rdma(self) -> bool:
        """Whether it is a port of an RDMA device."""
        return "/" in self.name


@dataclass(frozen=True)
class Counters:
    """What a port of an RDMA device has counted since its driver was loaded; None: it does not.

    What goes through it by RDMA is not counted by the network interface beside it.

    Attributes:
        downs: how often the link went down.
        discards: packets that could not be sent, for want of room at the other end or of a link.
        errors: by name.
    """

    sent_bytes: int | None
    received_bytes: int | None
    downs: int | None
    discards: int | None
    errors: Mapping[str, int]


def read_ports(host: Host) -> list[Port]:
    """All ports of hardware, and interfaces that the environment names for training."""
    return rdma_ports(host.sys) + net_ports(host.sys, named_interfaces(host.environment))


def rdma_ports(sys_root: Path) -> list[Port]:
    """Ports below class/infiniband."""
    found = []
    for device in list_folder(sys_root / "class/infiniband"):
        found += [_rdma_port(device, folder) for folder in list_folder(device / "ports")]
    return found


def _rdma_port(device: Path, folder: Path) -> Port:
    counters, state, physical = read_counters(folder), _state(folder, "state"), _state(folder, "phys_state")
    return Port(
        name=f"{device.name}/{folder.name}",
        kind=f"{read_text(folder / 'link_layer') or 'RDMA'} {read_text(device / 'hca_type') or ''}".strip(),
        is_up=is_rdma_up(folder),
        is_off=physical == "Disabled",
        stuck=state if physical == "LinkUp" and state != "ACTIVE" else "",
        rate_gbps=_leading_number(read_text(folder / "rate")),
        downs=counters.downs,
        errors=counters.errors,
        received_bits=None if counters.received_bytes is None else counters.received_bytes * 8,
    )


def is_rdma_up(folder: Path) -> bool:
    """Whether data can pass a port of an RDMA device, of which this is the folder."""
    return _state(folder, "state") == "ACTIVE" and _state(folder, "phys_state") == "LinkUp"


def _state(folder: Path, name: str) -> str:
    """``4: ACTIVE`` -> ``ACTIVE``."""
    return (read_text(folder / name) or "").partition(":")[2].strip()


def read_counters(folder: Path) -> Counters:
    """The counters of a port of an RDMA device, of which this is the folder."""
    counters = folder / "counters"
    sent, received = read_number(counters / "port_xmit_data"), read_number(counters / "port_rcv_data")
    return Counters(
        sent_bytes=None if sent is None else sent * _WORD_BYTES,
        received_bytes=None if received is None else received * _WORD_BYTES,
        downs=read_number(counters / "link_downed"),
        discards=read_number(counters / "port_xmit_discards"),
        errors=_numbers(counters, _RDMA_ERRORS),
    )


def net_ports(sys_root: Path, named: frozenset[str] = frozenset()) -> list[Port]:
    """Interfaces below class/net that belong to hardware, and those in `named`."""
    folders = list_folder(sys_root / "class/net")
    return [_net_port(each) for each in folders if (each / "device").exists() or each.name in named]


def _net_port(folder: Path) -> Port:
    speed = _leading_number(read_text(folder / "speed"))
    received = read_number(folder / "statistics/rx_bytes")
    flags = re.fullmatch(r"0x[0-9a-fA-F]+", read_text(folder / "flags") or "")  # such as ``0x1003``
    return Port(
        name=folder.name,
        kind=f"interface type {read_text(folder / 'type') or '?'}",
        is_up=is_interface_up(folder),
        address=read_text(folder / "address") or "",
        is_off=flags is not None and not int(flags[0], 16) & _IFF_UP,
        rate_gbps=speed / 1000 if speed and speed > 0 else None,
        downs=read_number(folder / "carrier_down_count"),
        ups=read_number(folder / "carrier_up_count"),
        errors=_numbers(folder / "statistics", _NET_ERRORS),
        received_bits=None if received is None else received * 8,
    )


def is_interface_up(folder: Path) -> bool:
    """Whether data can pass an interface, of which this is the folder.

    Loopback and some virtual devices do not know; they have a carrier where they are switched on.
    """
    state = read_text(folder / "operstate")
    return state == "up" or (state == "unknown" and read_text(folder / "carrier") != "0")


def named_interfaces(environment: Mapping[str, str]) -> frozenset[str]:
    """Interfaces that the environment names for training, in full."""
    names = [environment.get("PHALANX_INTERFACE", ""), environment.get("GLOO_SOCKET_IFNAME", "")]
    nccl = environment.get("NCCL_SOCKET_IFNAME", "")
    if not nccl.startswith("^"):
        names += nccl.removeprefix("=").split(",")
    return frozenset(name.strip() for name in names if name.strip())


def is_named(port: Port, environment: Mapping[str, str]) -> bool:
    """Whether the environment says that training uses this port."""
    devices = environment.get("NCCL_IB_HCA", "")
    exact = devices.startswith("=")
    if devices.startswith("^"):
        devices = ""
    for each in filter(None, devices.removeprefix("=").split(",")):
        device, _, number = each.partition(":")
        name, _, own_number = port.name.partition("/")
        same = name == device if exact else name.startswith(device)
        if same and own_number and number in ("", own_number):
            return True
    return port.name in named_interfaces(environment)


def _leading_number(text: str | None) -> float | None:
    match = re.match(r"-?\d+(\.\d+)?", text or "")
    return float(match[0]) if match else None


def _numbers(folder: Path, names: tuple[str, ...]) -> dict[str, int]:
    read = {name: read_number(folder / name) for name in names}
    return {name: value for name, value in read.items() if value is not None}
