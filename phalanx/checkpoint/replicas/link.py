"""A connection between two keepers: who they are to each other, small messages, and runs of raw bytes.

    caller                               listener
      ── Hello: version, a nonce ──────────►
      ◄── Challenge: version, a nonce, its proof
      ── Proof ────────────────────────────►
      ◄── Welcome: name of its host

A proof is an HMAC-SHA256 of both nonces and the role under the token of the job, so the token itself is never sent and
neither side talks to one that does not have it. From then on every message carries an HMAC under a key made of token
and nonces, over its place in the conversation and its direction: none can be changed, repeated or put in by others.
Raw bytes are not covered by it; they are checked against the sums of a record, which came in a message. Nothing is
encrypted.

A message is a length, a JSON list of a kind and fields, and its HMAC. Nothing is unpickled. Torch-free.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import mmap
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from phalanx.checkpoint.replicas.contract import Endpoint
from phalanx.checkpoint.replicas.messages import KINDS, Challenge, Hello, Message, Proof, Refused, Welcome

VERSION = 1

IDLE_S = 20.0
"""A connection on which nothing moves for so long is given up."""

_GREETING_S = 10.0
_MAX_GREETING_BYTES = 1024
_MAX_MESSAGE_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20
_LENGTH = struct.Struct("!I")
_TOKEN_BYTES = 32

# A host that died without a word is noticed within a minute on a connection on which nothing is said.
_TCP_OPTIONS = (
    (socket.TCP_NODELAY, 1),
    (socket.TCP_KEEPIDLE, 30),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
)

M = TypeVar("M", bound=Message)


class LinkError(OSError):
    """The other side is not what it should be, or went away."""


def new_token() -> str:
    """A token for a job: what keepers know each other by, as hexadecimal digits."""
    return secrets.token_hex(_TOKEN_BYTES)


def _ignore(piece: memoryview) -> None:
    """For who does not want to hear of it."""


class Link:
    """One end of a connection, used by one thread at a time; `hang_up` may be called by any.

    Args:
        connection: a stream socket, which this takes over.
        host: name of the other side's host, for messages.
        idle_s: see `IDLE_S`.
    """

    def __init__(self, connection: socket.socket, host: str, idle_s: float = IDLE_S) -> None:
        self.host = host
        self._socket = connection
        self._key: bytes | None = None
        self._sent = self._received = 0
        self._role, self._other = b"caller", b"listener"
        for option, value in _TCP_OPTIONS:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._is_local = _leads_here(connection)
        self.set_idle(idle_s)

    def set_idle(self, seconds: float) -> None:
        """Have whatever waits for the other side give up after so long without a byte."""
        # Time-outs of the kernel's: with those of Python every piece of a stream would cost a poll as well.
        self._socket.setblocking(True)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            LinkError: the other side went away, or takes nothing.
        """
        body = json.dumps([type(message).__name__, *vars(message).values()], separators=(",", ":")).encode()
        tag = self._tag(self._role, self._sent, body)
        self._sent += 1
        with self._guarded():
            self._socket.sendall(_LENGTH.pack(len(body)) + body + tag)

    def receive(self, *expected: type[M]) -> M:
        """Wait for the next message, which has to be of one of these kinds.

        Raises:
            LinkError: it is not, was changed on its way, or the other side went away.
        """
        limit = _MAX_GREETING_BYTES if self._key is None else _MAX_MESSAGE_BYTES
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > limit:
            raise LinkError(f"{self.host} announced a message of {length} bytes; the limit is {limit}")
        body = self._read(length)
        tag = self._tag(self._other, self._received, body)
        self._received += 1
        if not hmac.compare_digest(self._read(len(tag)), tag):
            raise LinkError(f"a message from {self.host} was changed on its way")
        return self._parse(body, expected)

    def waits_for_message(self) -> bool:
        """Wait, for as long as it takes, until a message comes; False: the other side has hung up instead."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()
        return self._peek() != b""

    def is_broken(self) -> bool:
        """Whether the other side has hung up, as far as is known here, or said something unasked."""
        return self._peek() is not None

    def send_file(self, descriptor: int, start: int, length: int, deadline_s: float) -> None:
        """Send bytes of a memfd, to another host straight from its pages.

        Until the other side has answered, those pages must not change.

        Args:
            deadline_s: `time.monotonic` after which this gives up.

        Raises:
            LinkError: the other side went away, or takes them too slowly.
        """
        if length == 0:
            return
        if self._is_local:
            self._send_copied(descriptor, start, length, deadline_s)
            return
        sent = 0
        while sent < length:
            with self._guarded():
                count = os.sendfile(self._socket.fileno(), descriptor, start + sent, length - sent)
            if count == 0:
                raise LinkError(f"the memory to be sent to {self.host} ends before byte {start + length}")
            sent += count
            self._check(deadline_s)

    def _send_copied(self, descriptor: int, start: int, length: int, deadline_s: float) -> None:
        # Over loopback the receiver would copy out of single pages, which costs more than a copy here does: 1.2 GB/s
        # instead of 1.7 per second of CPU time, both ends and the sums included.
        with mmap.mmap(descriptor, start + length, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as memory:
            sent = start
            while sent < start + length:
                with self._guarded(), memory[sent : min(sent + _PIECE_BYTES, start + length)] as piece:
                    sent += self._socket.send(piece)
                self._check(deadline_s)

    def receive_into(
        self, memory: memoryview, deadline_s: float, heard: Callable[[memoryview], object] = _ignore
    ) -> None:
        """Fill `memory` with what comes, calling `heard` with every piece as it arrives.

        Raises:
            LinkError: the other side went away before it was full, or is too slow.
        """
        received = 0
        while received < len(memory):
            piece = memory[received : received + _PIECE_BYTES]
            with self._guarded():
                count = self._socket.recv_into(piece)
            if count == 0:
                raise LinkError(f"{self.host} hung up with {len(memory) - received} bytes still to come")
            heard(piece[:count])
            received += count
            self._check(deadline_s)

    def hang_up(self) -> None:
        """Who waits in another method, in any thread, is told by a `LinkError`; the thread that uses this closes it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and give the descriptor back."""
        self.hang_up()
        self._socket.close()

    def secure(self, token: str, nonces: str, *, listening: bool) -> None:
        """From now on messages carry an HMAC."""
        if listening:
            self._role, self._other = self._other, self._role
        self._key = _mac(token, "key", nonces)
        self._sent = self._received = 0

    def _peek(self) -> bytes | None:
        """The next byte, none at the end; None: nothing has come."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _tag(self, role: bytes, number: int, body: bytes) -> bytes:
        if self._key is None:
            return b""
        return hmac.digest(self._key, role + struct.pack("!Q", number) + body, "sha256")

    def _read(self, length: int) -> bytes:
        # Memory is taken as bytes come, not as they are announced.
        content = bytearray()
        while len(content) < length:
            with self._guarded():
                piece = self._socket.recv(min(_PIECE_BYTES, length - len(content)))
            if not piece:
                raise LinkError(f"{self.host} hung up")
            content += piece
        return bytes(content)

    def _parse(self, body: bytes, expected: tuple[type[M], ...]) -> M:
        try:
            kind, *fields = json.loads(body)
            message: Any = KINDS[kind](*fields)
        except (ValueError, KeyError, TypeError):
            raise LinkError(f"{self.host} sent something that is no message") from None
        if isinstance(message, expected):
            return message
        if isinstance(message, Refused):
            raise LinkError(f"{self.host} refused: {message.why}")
        raise LinkError(f"{self.host} sent {kind} where {' or '.join(e.__name__ for e in expected)} was due")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:  # the kernel's time-out
            raise LinkError(f"nothing moved on the connection to {self.host}") from None
        except OSError as error:
            raise LinkError(f"the connection to {self.host} broke: {error.strerror}") from None

    def _check(self, deadline_s: float) -> None:
        if time.monotonic() > deadline_s:
            raise LinkError(f"the connection to {self.host} is too slow")


def call(endpoint: Endpoint, token: str, idle_s: float = IDLE_S) -> Link:
    """Connect to the keeper at `endpoint`, trying its addresses in order, and make sure that it has the token too.

    Raises:
        LinkError: no address answers, it has another token, or is of another version.
    """
    link = Link(_connect(endpoint), endpoint.host, min(idle_s, _GREETING_S))
    try:
        _greet(link, token)
    except BaseException:
        link.close()
        raise
    link.set_idle(idle_s)
    return link


def answer(connection: socket.socket, caller: str, token: str, host: str, idle_s: float = IDLE_S) -> Link:
    """The listener's part of the greeting.

    Args:
        caller: its address, for messages.
        host: name of this host.

    Raises:
        LinkError: the caller does not have the token, or is of another version.
    """
    link = Link(connection, caller, min(idle_s, _GREETING_S))
    hello = link.receive(Hello)
    if hello.version != VERSION or not isinstance(hello.nonce, str):
        link.send(Refused(f"this keeper speaks version {VERSION}, not {hello.version}"))
        raise LinkError(f"{caller} speaks version {hello.version} of the protocol, not {VERSION}")
    nonce = secrets.token_hex(_TOKEN_BYTES)
    nonces = f"{hello.nonce} {nonce}"
    link.send(Challenge(VERSION, nonce, _mac(token, "listener", nonces).hex()))
    if not _is(link.receive(Proof).proof, _mac(token, "caller", nonces)):
        link.send(Refused("it was called with another token"))
        raise LinkError(f"{caller} does not have the token of this job")
    link.secure(token, nonces, listening=True)
    link.send(Welcome(host))
    link.set_idle(idle_s)
    return link


def _greet(link: Link, token: str) -> None:
    nonce = secrets.token_hex(_TOKEN_BYTES)
    link.send(Hello(VERSION, nonce))
    challenge = link.receive(Challenge)
    if challenge.version != VERSION:
        raise LinkError(f"{link.host} speaks version {challenge.version} of the protocol, not {VERSION}")
    nonces = f"{nonce} {challenge.nonce}"
    if not _is(challenge.proof, _mac(token, "listener", nonces)):
        raise LinkError(f"{link.host} does not have the token of this job")
    link.send(Proof(_mac(token, "caller", nonces).hex()))
    link.secure(token, nonces, listening=False)
    link.receive(Welcome)


def _connect(endpoint: Endpoint) -> socket.socket:
    problems = []
    for address in endpoint.addresses:
        try:
            return socket.create_connection((address, endpoint.port), timeout=_GREETING_S / 2)
        except OSError as error:
            problems.append(f"{address} port {endpoint.port}: {error.strerror or error}")
    raise LinkError(f"{endpoint.host} cannot be reached: {'; '.join(problems) or 'it has no address'}")


def _leads_here(connection: socket.socket) -> bool:
    try:
        address = connection.getpeername()[0]
    except OSError:  # gone again, which the next call will say
        return True
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _mac(token: str, role: str, nonces: str) -> bytes:
    return hmac.digest(token.encode(), f"phalanx replica {VERSION} {role} {nonces}".encode(), "sha256")


def _is(proof: object, expected: bytes) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(), expected.hex().encode())
