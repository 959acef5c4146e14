"""Bandwidth, latency and clock between two hosts: one serves, one measures. TCP.

A message is one letter and a number of eight bytes. ``P``: answer the same (latency). ``T``: answer this host's Unix
time in ns. ``S`` n: n bytes follow; answer when all are there. ``R`` n: send n bytes. Nothing is stored or run, and
a connection that asks for more than a limit, or says nothing for long, is closed.

Both sides first prove that they know the same key, which does not travel (`phalanx.ipc.handshake`). Without one, only
this host is served.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.addresses import is_loopback
from phalanx.core.errors import UserError
from phalanx.ipc.handshake import BACKLOG, HELLO_BYTES, MESSAGE_BYTES, Gate, Handshake, NotAuthenticError, derive, knock

_log = logging.getLogger(__name__)

_LABEL = b"phalanx peer 2"
_HEADER = struct.Struct("!cQ")
_BLOCK = bytes(1 << 18)
_MAX_BYTES = 1 << 34
_IDLE_S = 30.0
_AT_ONCE = 64  # connections; of a host, few ask at one time
_PINGS = 64
_WARM_BYTES = 4 << 20

Clock = Callable[[], int]


class PeerError(Exception):
    """The peer cannot be reached, or what answers there is not one."""


@dataclass(frozen=True)
class PeerMeasure:
    """What was measured of the way to a peer.

    Attributes:
        send_bytes_per_s, receive_bytes_per_s: over one connection.
        latency_s: median of a small message there and back.
        clock_ahead_s: of the peer's clock against ours; negative: it is behind.
        clock_error_s: by how much that may be wrong: half of the shortest way there and back.
    """

    peer: str
    send_bytes_per_s: float
    receive_bytes_per_s: float
    latency_s: float
    clock_ahead_s: float
    clock_error_s: float


@contextmanager
def serve_peer(
    host: str = "127.0.0.1", port: int = 0, clock_ns: Clock = time.time_ns, *, key: bytes | None = None
) -> Iterator[int]:
    """Serve measurements for as long as the block runs; yields the port.

    Args:
        key: that those who ask have to know; None: nobody has to prove anything, and only this host is served.

    Raises:
        OSError: it cannot listen there.
        UserError: other hosts reach this address, and there is no key.
    """
    if key is None and not is_loopback(host):
        cure = "give a key that both sides know (--token-file), or serve on 127.0.0.1"
        raise UserError("other hosts can reach this address", cure=cure, field="peer", value=host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, port), family=family, backlog=BACKLOG)
    port = server.getsockname()[1]
    secret = _secret(key)
    places = threading.BoundedSemaphore(_AT_ONCE)

    def admit(connection: socket.socket, address: str, handshake: Handshake) -> None:
        if places.acquire(blocking=False):
            work = (connection, clock_ns, handshake, places)
            threading.Thread(target=_serve, args=work, name="peer", daemon=True).start()
        else:
            connection.close()

    gate = Gate(server, lambda: secret, _LABEL, admit, _log.info, name="peer server")
    try:
        yield port
    finally:
        gate.close()


def _serve(
    connection: socket.socket, clock_ns: Clock, handshake: Handshake, places: threading.BoundedSemaphore
) -> None:
    with connection, contextlib.suppress(OSError, PeerError):
        connection.settimeout(_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection.sendall(handshake.write())
            while True:
                kind, number = _HEADER.unpack(_receive(connection, _HEADER.size))
                _answer(connection, kind, number, clock_ns)
        finally:
            places.release()


def _introduce(connection: socket.socket, key: bytes | None) -> None:
    """Prove to a peer that we know the key, and see that it does.

    What is measured then goes in clear: who can change packets on the way can spoil a measurement, and no more.
    """
    try:
        handshake, proof = knock(_receive(connection, HELLO_BYTES), _LABEL, _secret(key))
        connection.sendall(proof)
        handshake.read(_receive(connection, MESSAGE_BYTES))
    except NotAuthenticError:
        raise PeerError("the peer does not know the key") from None
    except ValueError as error:
        raise PeerError(str(error)) from None


def _secret(key: bytes | None) -> bytes:
    """What both sides prove to have; without a key it is not a secret."""
    return derive(key or b"", "measuring the network")


def read_key(path: Path) -> bytes:
    """The key in a file, such as that with a job's token.

    Raises:
        PeerError: there is none.
    """
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise PeerError(f"the key cannot be read: {error}") from None
    if not key:
        raise PeerError(f"no key is in {path}")
    return key


def _answer(connection: socket.socket, kind: bytes, number: int, clock_ns: Clock) -> None:
    if kind not in (b"P", b"T") and number > _MAX_BYTES:
        raise PeerError("too much is asked for")
    if kind == b"P":
        connection.sendall(_HEADER.pack(kind, number))
    elif kind == b"T":
        connection.sendall(_HEADER.pack(kind, clock_ns()))
    elif kind == b"S":
        _drain(connection, number)
        connection.sendall(_HEADER.pack(kind, number))
    elif kind == b"R":
        _send(connection, number)
    else:
        raise PeerError("no such request")


def measure_peer(
    address: str,
    *,
    transfer_bytes: int = 64 << 20,
    limit_s: float = 10.0,
    within_s: float = 60.0,
    clock_ns: Clock = time.time_ns,
    key: bytes | None = None,
) -> PeerMeasure:
    """Measure the way to a host that serves at ``address``, HOST:PORT. Raises `PeerError`, ValueError for the address.

    Args:
        transfer_bytes: sent in each direction.
        limit_s: of any single wait.
        within_s: of all together: on a link that loses most of its packets each wait may end in time.
        key: that both sides know; None: the peer asks for none.
    """
    with _connected(address, limit_s, within_s) as connection:
        _introduce(connection, key)
        ways = sorted(_ask_clock(connection, clock_ns) for _ in range(_PINGS))
        _time_send(connection, _WARM_BYTES)
        sending_s = _time_send(connection, transfer_bytes)
        began_s = time.perf_counter()
        connection.sendall(_HEADER.pack(b"R", transfer_bytes))
        _drain(connection, transfer_bytes)
        receiving_s = time.perf_counter() - began_s
    shortest_s, ahead_s = ways[0]
    return PeerMeasure(
        peer=address,
        send_bytes_per_s=transfer_bytes / sending_s,
        receive_bytes_per_s=transfer_bytes / receiving_s,
        latency_s=statistics.median(way for way, _ in ways),
        clock_ahead_s=ahead_s,
        clock_error_s=shortest_s / 2,
    )


@contextmanager
def _connected(address: str, limit_s: float, within_s: float) -> Iterator[socket.socket]:
    """A connection that is hung up after `within_s`; whatever goes wrong on it is a `PeerError`."""
    host, _, port = address.rpartition(":")
    until_s, is_late = time.monotonic() + within_s, threading.Event()
    try:
        first_s = min(limit_s, within_s)
        with socket.create_connection((host.strip("[]"), int(port)), timeout=first_s) as connection:
            connection.settimeout(limit_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def hang_up() -> None:
                is_late.set()
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

            timer = threading.Timer(max(until_s - time.monotonic(), 0.0), hang_up)
            timer.daemon = True
            timer.start()
            try:
                yield connection
            finally:
                timer.cancel()
    except (OSError, PeerError) as error:
        what = f"no measure within {within_s:g} s" if is_late.is_set() else error
        raise PeerError(f"{address}: {what}") from error


def _ask_clock(connection: socket.socket, clock_ns: Clock) -> tuple[float, float]:
    """Seconds there and back, and by how much the peer's clock was ahead of ours in the middle of that."""
    asked_ns, began_ns = clock_ns(), time.monotonic_ns()
    connection.sendall(_HEADER.pack(b"T", 0))
    kind, theirs_ns = _HEADER.unpack(_receive(connection, _HEADER.size))
    way_ns = time.monotonic_ns() - began_ns
    if kind != b"T":
        raise PeerError("what answers is no peer")
    return way_ns / 1e9, (theirs_ns - asked_ns - way_ns / 2) / 1e9


def _time_send(connection: socket.socket, num_bytes: int) -> float:
    began_s = time.perf_counter()
    connection.sendall(_HEADER.pack(b"S", num_bytes))
    _send(connection, num_bytes)
    _receive(connection, _HEADER.size)
    return time.perf_counter() - began_s


def _send(connection: socket.socket, num_bytes: int) -> None:
    view = memoryview(_BLOCK)
    while num_bytes > 0:
        part = view[: min(num_bytes, len(view))]
        connection.sendall(part)
        num_bytes -= len(part)


def _drain(connection: socket.socket, num_bytes: int) -> None:
    block = bytearray(len(_BLOCK))
    view = memoryview(block)
    while num_bytes > 0:
        got = connection.recv_into(view[: min(num_bytes, len(view))])
        if not got:
            raise PeerError("the connection was closed")
        num_bytes -= got


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = connection.recv(num_bytes - len(parts))
        if not part:
            raise PeerError("the connection was closed")
        parts += part
    return bytes(parts)
