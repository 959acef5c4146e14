"""Network addresses and interfaces as people and the settings of NCCL and gloo name them."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(address: str) -> bool:
    """Whether ``HOST``, ``HOST:PORT``, ``[IPV6]:PORT`` or an IPv6 address is reached from this host only.

    A name other than localhost is not: what it stands for may change.
    """
    host = host_of(address)
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def own_address(host: str) -> tuple[str, socket.AddressFamily]:
    """By which address this machine reaches `host`; nothing is sent for it.

    Raises:
        OSError: `host` is unknown, or there is no way to it.
    """
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, *_, place = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return probe.getsockname()[0], family


def host_of(address: str) -> str:
    """The host of an address that may have a port."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address


def names_interface(pattern: str, name: str, *, exact: bool = False) -> bool:
    """Whether a pattern such as that of ``NCCL_SOCKET_IFNAME`` means this interface.

    ``eth,ib`` are prefixes, ``=eth0`` a whole name, ``^`` before either means all others; an empty one means none.

    Args:
        exact: the pattern is a list of whole names, as gloo's.
    """
    excluding = not exact and pattern.startswith("^")
    pattern = pattern.removeprefix("^") if excluding else pattern
    if not exact and pattern.startswith("="):
        exact, pattern = True, pattern[1:]
    parts = [part.strip() for part in pattern.split(",") if part.strip()]
    found = name in parts if exact else any(name.startswith(part) for part in parts)
    return bool(parts) and found is not excluding


def stay_here() -> dict[str, str]:
    """Variables by which libraries that open sockets of their own between ranks keep to loopback.

    Gloo would listen at the address that the name of the machine stands for, which others may reach.
    """
    names = {name for _, name in socket.if_nameindex()}
    name = next((name for name in ("lo", "lo0") if name in names), None)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name}
