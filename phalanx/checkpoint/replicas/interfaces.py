"""Which network interface replicas go through, and how fast it is. Torch-free.

`choose` is a pure function of a table of facts; `interfaces_here` makes the table of this host.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from phalanx.checkpoint.keeper_contract import Endpoint
from phalanx.core.addresses import names_interface
from phalanx.core.errors import UserError

VARIABLE = "PHALANX_INTERFACE"

# In the order in which they are asked; the first has the syntax of the second.
_NCCL, _GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"

_VIRTUAL = (
    *("docker", "br-", "veth", "virbr", "vnet", "cni", "flannel", "cali", "cilium", "lxc", "lxd", "podman", "kube"),
    *("tun", "tap", "wg", "tailscale", "dummy", "ifb"),
)


@dataclass(frozen=True)
class Interface:
    """What is known of one.

    Attributes:
        addresses: IPv4 first, then IPv6; none that only mean something on one link.
        bits_per_s: None: unknown.
    """

    name: str
    addresses: tuple[str, ...]
    up: bool = True
    bits_per_s: int | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether it leads nowhere."""
        return bool(self.addresses) and all(ipaddress.ip_address(address).is_loopback for address in self.addresses)


@dataclass(frozen=True)
class Network:
    """Where a keeper listens.

    Attributes:
        why: it was chosen; for people.
    """

    interface: str
    addresses: tuple[str, ...]
    bits_per_s: int | None
    why: str

    def endpoint(self, host: str, port: int) -> Endpoint:
        """For other hosts. (It listens at the first address only.)"""
        return Endpoint(host, self.addresses[:1], port, self.interface, self.bits_per_s)


LOOPBACK = Network("lo", ("127.0.0.1",), None, "one host")
"""Where nobody on another host can come."""


def network(hosts: int, environment: Mapping[str, str]) -> Network:
    """Where the keeper of this host is to listen in a job of so many hosts: at loopback unless there are several.

    Raises:
        UserError: ``PHALANX_INTERFACE`` names none that there is.
    """
    return LOOPBACK if hosts <= 1 else choose(interfaces_here(), environment)


def choose(interfaces: Sequence[Interface], environment: Mapping[str, str]) -> Network:
    """The interface to reach other hosts by.

    What is down or has no address is never chosen, loopback only where ``PHALANX_INTERFACE`` names it or there is
    nothing else (several keepers play several hosts on one). ``PHALANX_INTERFACE`` decides, else
    ``NCCL_SOCKET_IFNAME``, else ``GLOO_SOCKET_IFNAME``, among those left; then real ones come before those of
    containers and tunnels, and the fastest comes first. InfiniBand of unknown speed counts as fastest, others of
    unknown speed as slowest.

    Raises:
        UserError: ``PHALANX_INTERFACE`` matches none.
    """
    usable = [each for each in interfaces if each.up and each.addresses]
    named, why = _named(usable, environment)
    if not named:
        return replace(LOOPBACK, why="no interface but loopback is up and has an address: no other host can come")
    best = min(named, key=_rank)
    speed = "of unknown speed" if best.bits_per_s is None else f"{best.bits_per_s / 1e9:g} Gbit/s"
    return Network(best.name, best.addresses, best.bits_per_s, f"{why}, {speed}")


def _named(usable: list[Interface], environment: Mapping[str, str]) -> tuple[list[Interface], str]:
    others = [each for each in usable if not each.is_loopback]
    ignored = ""
    for variable in (VARIABLE, _NCCL, _GLOO):
        pattern = environment.get(variable, "").strip()
        if not pattern:
            continue
        among = usable if variable == VARIABLE else others
        found = [each for each in among if names_interface(pattern, each.name, exact=variable == _GLOO)]
        if found:
            return found, f"{ignored}{variable}={pattern}"
        names = ", ".join(each.name for each in among) or "none"
        if variable == VARIABLE:
            raise UserError(
                "no interface of this name is up and has an address",
                cure=f"name one of: {names}",
                field=variable,
                value=pattern,
            )
        # These are about other libraries' connections, and may be set for other hosts than this one.
        ignored += f"{variable}={pattern} matches none of {names}; "
    return others, f"{ignored}the fastest known"


def _rank(interface: Interface) -> tuple[bool, bool, float, bool, str]:
    infiniband = interface.name.startswith("ib")
    speed = float(interface.bits_per_s or 0) or (float("inf") if infiniband else 0.0)
    return interface.is_loopback, interface.name.startswith(_VIRTUAL), -speed, not infiniband, interface.name


def interfaces_here() -> list[Interface]:
    """Those of this host."""
    states = psutil.net_if_stats()
    rows = []
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        up = state is not None and state.isup
        speed = _speed(name, 0 if state is None else state.speed)
        rows.append(Interface(name, _reachable([(each.family, each.address) for each in addresses]), up, speed))
    return rows


def _reachable(addresses: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for kind, address in addresses:
            if kind == family and not ipaddress.ip_address(address.partition("%")[0]).is_link_local:
                found.append(address)
    return tuple(found)


def _speed(name: str, mbit_per_s: int) -> int | None:
    """In bit/s. Of InfiniBand, psutil knows nothing; the kernel tells it of the port behind."""
    if 0 < mbit_per_s != 65535:  # which is what a driver says that does not know
        return mbit_per_s * 1_000_000
    for rate in sorted(Path("/sys/class/net", name, "device", "infiniband").glob("*/ports/*/rate")):
        with suppress(OSError, ValueError, IndexError):
            return int(float(rate.read_text().split()[0]) * 1e9)  # such as "400 Gb/sec (4X NDR)"
    return None
