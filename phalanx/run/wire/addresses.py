"""Where the driver listens: how an address is written, and the file that tells executors."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from phalanx.core import files
from phalanx.core.errors import UserError


class Address(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Address:
    """``host:port`` or ``[v6]:port``.

    Raises:
        UserError: it is neither.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise UserError(
            "not an address", cure="write host:port, or [host]:port for IPv6", field="driver address", value=text
        )
    return Address(host, int(port))


def publish(path: Path, address: Address) -> None:
    """Write where the driver listens into a file, all at once."""
    files.write_bytes(path, f"{address}\n".encode())


def published(path: Path) -> Callable[[], list[str]]:
    """What reads that file each time that it is called: one address a line. It raises OSError while there is none."""
    return lambda: path.read_text(encoding="utf-8").split()


def address_towards(target: str) -> str:
    """The address of this machine from which `target` is reached; nothing is sent.

    Raises:
        UserError: it is not reached.
    """
    try:
        kind, _, _, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        cure = "see whether this machine knows the name, and has a way to it"
        raise UserError(f"is not reached from here ({error})", cure=cure, field="address", value=target) from None
