"""Network addresses as people write them."""

from __future__ import annotations

import ipaddress


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


def host_of(address: str) -> str:
    """The host of an address that may have a port."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address
