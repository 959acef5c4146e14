"""Where the driver listens: how an address is written, and the file that executors read it from."""

from __future__ import annotations

import errno
import socket
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from phalanx.core import files
from phalanx.core.errors import UserError

_WORDS_CHARS = 80


class Address(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Address:
    """``host:port`` or ``[v6]:port``. Raises UserError: it is neither."""
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


def bound(address: Address, field: str) -> socket.socket:
    """A socket that is bound there, so that no other can be; port 0 is any that is free.

    Args:
        field: of the job file, that names the address.

    Raises:
        UserError: it cannot be listened at; it names the process that listens there, where that can be seen.
    """
    try:
        kind, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(kind, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        taken = f"; {_who_listens(address.port)}" if error.errno == errno.EADDRINUSE else ""
        problem = f"cannot be listened at ({error.strerror or error}{taken})"
        cure = "give another HOST:PORT, or port 0 for any"
        raise UserError(problem, cure=cure, field=field, value=str(address)) from None
    return listening


def _who_listens(port: int) -> str:
    """The process that has a port, for people; those of other users cannot be seen."""
    with suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                words = textwrap.shorten(" ".join(psutil.Process(one.pid).cmdline()), _WORDS_CHARS, placeholder=" …")
                return f"process {one.pid} has it: {words or 'no command line'}"
    return "a process that cannot be seen from here has it, such as another user's job"


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
