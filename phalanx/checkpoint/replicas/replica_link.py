"""A connection between two keepers: who they are to each other, small messages, and runs of raw bytes, all sealed.

    caller                               listener
      ◄── what it speaks, something new ───
      ── proof ────────────────────────────►  (until here `phalanx.ipc.handshake`: no thread, no memory)
      ◄── its proof
      ◄── Welcome: name of its host

The proofs are the two messages of `phalanx.ipc.handshake` under the key that both hosts derive from the job's secret.
What follows is sealed under keys of this connection alone: who listens learns lengths and times and nothing else; what
is changed, repeated or put in by others ends the connection before any of it is used.

A message is a length and a sealed JSON list of a kind and fields. Raw bytes are sealed in pieces of `PIECE_BYTES`, the
last of a run shorter. Nothing is unpickled.
"""

from __future__ import annotations

import json
import mmap
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from phalanx.checkpoint.keeper_contract import Endpoint
from phalanx.ipc.handshake import HELLO_BYTES, MESSAGE_BYTES, TAG_BYTES, Cipher, Handshake, NotAuthenticError, knock


class Message(msgspec.Struct, frozen=True):
    """Of the classes below."""


class Welcome(Message, frozen=True):
    """Listener: you are let in; `host`: who says so."""

    host: str


class Refused(Message, frozen=True):
    """Listener: no. `later_attempt`: because it has seen a later attempt than the caller's."""

    why: str
    later_attempt: bool = False


class Offer(Message, frozen=True):
    """Caller: take a replica; `Record.to_text`."""

    record: str


class PlanNeeded(Message, frozen=True):
    """Listener: I do not know the plan of that record."""


class Plan(Message, frozen=True):
    """`ShardPlan.to_bytes`."""

    text: str


class Go(Message, frozen=True):
    """Listener: there is memory for it; send the elements."""


class Stored(Message, frozen=True):
    """Listener: they are there, whole and checked, and committed."""


class List(Message, frozen=True):
    """Caller: what do you hold?"""


class Holdings(Message, frozen=True):
    """Listener: pairs of `Record.to_text` and whether it is a replica."""

    held: list[tuple[str, bool]]


class Want(Message, frozen=True):
    """Caller: give me runs of chunks (the first, how many) of a shard, and its plan where it is asked for."""

    step: int
    attempt: int
    set_id: str
    rank: int
    runs: list[tuple[int, int]]
    plan: bool


class Given(Message, frozen=True):
    """Listener: here is its record, perhaps its plan, and then the bytes of the runs."""

    record: str
    plan: str


class Missing(Message, frozen=True):
    """Listener: that copy is not here, or not any more."""

    why: str


KINDS: Mapping[str, type[Message]] = MappingProxyType({kind.__name__: kind for kind in Message.__subclasses__()})
"""Classes by their names."""


LABEL = b"phalanx keeper 2"
"""What is spoken; another number is another protocol."""

PIECE_BYTES = 1 << 20
"""Raw bytes are sealed so many at a time; runs begin at a multiple of it. docs/replicas.md has the figures."""

IDLE_S = 20.0
"""A connection on which nothing moves for so long is given up."""

_GREETING_S = 10.0
_MAX_MESSAGE_BYTES = 256 << 20
_LENGTH = struct.Struct("!I")

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


class TurnedAwayError(LinkError):
    """A gate has hung up without a message: it has another secret, or strangers crowd it. Calling again may help."""


class ReplicaLink:
    """One end of a connection, used by one thread at a time; `hang_up` may be called by any.

    Args:
        connection: a blocking stream socket, which this takes over.
        host: name of the other side's host, for messages.
    """

    def __init__(self, connection: socket.socket, host: str, idle_s: float = IDLE_S) -> None:
        self.host = host
        self._socket = connection
        self._sending: Cipher
        self._receiving: Cipher
        self._sealed = memoryview(bytearray(PIECE_BYTES + TAG_BYTES))
        for option, value in _TCP_OPTIONS:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.set_idle(idle_s)

    def set_idle(self, seconds: float) -> None:
        """Give up whatever waits for the other side after so long without a byte."""
        # Time-outs of the kernel's: with those of Python every piece of a stream would cost a poll as well.
        self._socket.setblocking(True)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def ask(self, secret: bytes) -> None:
        """The caller's part of the greeting.

        Raises:
            LinkError: no keeper answers there, or it does not have the secret.
        """
        try:
            hello = self._read(HELLO_BYTES)
        except LinkError as error:
            raise TurnedAwayError(str(error)) from None
        try:
            handshake, proof = knock(hello, LABEL, secret)
        except ValueError as error:
            raise LinkError(f"what answers for {self.host} is no keeper of this version: {error}") from None
        with self._guarded():
            self._socket.sendall(proof)
        try:
            answer = self._read(MESSAGE_BYTES)
        except LinkError as error:
            raise TurnedAwayError(f"{self.host} does not take the secret of this job: {error}") from None
        try:
            handshake.read(answer)
        except NotAuthenticError:
            raise LinkError(f"{self.host} does not have the secret of this job") from None
        self._sending, self._receiving = handshake.ciphers()
        host = self.receive(Welcome).host
        if host != self.host:
            raise LinkError(f"at the address of {self.host} there is {host}")

    def let_in(self, handshake: Handshake, host: str) -> None:
        """The listener's part, once a gate has seen the proof; `host`: this one's name."""
        with self._guarded():
            self._socket.sendall(handshake.write())
        self._sending, self._receiving = handshake.ciphers()
        self.send(Welcome(host))

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            LinkError: the other side went away, or takes nothing.
        """
        body = json.dumps([type(message).__name__, *msgspec.structs.astuple(message)], separators=(",", ":")).encode()
        sealed = self._sending.seal(body)
        with self._guarded():
            self._socket.sendall(_LENGTH.pack(len(sealed)) + sealed)

    def receive(self, *expected: type[M]) -> M:
        """Wait for the next message, which has to be of one of these kinds.

        Raises:
            LinkError: it is not, was changed on its way, or the other side went away.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _MAX_MESSAGE_BYTES:
            raise LinkError(f"{self.host} announced a message of {length} bytes; the limit is {_MAX_MESSAGE_BYTES}")
        sealed = self._read(length)
        try:
            body = self._receiving.open(sealed)
        except NotAuthenticError:
            raise LinkError(f"a message from {self.host} was changed on its way") from None
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
        """Send bytes of a memfd.

        Args:
            start: a multiple of `PIECE_BYTES`.
            deadline_s: `time.monotonic` after which this gives up.

        Raises:
            LinkError: the other side went away, or takes them too slowly.
        """
        assert start % PIECE_BYTES == 0
        if length == 0:
            return
        with mmap.mmap(descriptor, start + length, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as memory:
            for first in range(start, start + length, PIECE_BYTES):
                with memory[first : min(first + PIECE_BYTES, start + length)] as piece:
                    sealed = self._sealed[: len(piece) + TAG_BYTES]
                    self._sending.seal_into(piece, sealed)
                sent = 0
                while sent < len(sealed):
                    with self._guarded():
                        sent += self._socket.send(sealed[sent:])
                    self._check(deadline_s)

    def receive_into(
        self, memory: memoryview, deadline_s: float, received: Callable[[memoryview], object] = lambda piece: None
    ) -> None:
        """Fill `memory`, which begins at a multiple of `PIECE_BYTES` of what was sent, with what comes.

        Args:
            received: called with every piece while it is in the cache.

        Raises:
            LinkError: the other side went away, is too slow, or a piece was changed on its way.
        """
        for first in range(0, len(memory), PIECE_BYTES):
            piece = memory[first : first + PIECE_BYTES]
            sealed = self._sealed[: len(piece) + TAG_BYTES]
            count = 0
            while count < len(sealed):
                with self._guarded():
                    more = self._socket.recv_into(sealed[count:])
                if more == 0:
                    raise LinkError(f"{self.host} hung up with {len(memory) - first} bytes still to come")
                count += more
                self._check(deadline_s)
            try:
                self._receiving.open_into(sealed, piece)
            except NotAuthenticError:
                raise LinkError(f"bytes from {self.host} were changed on their way") from None
            received(piece)

    def hang_up(self) -> None:
        """Whatever waits in another method, in any thread, raises a `LinkError`; its own thread closes it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and give the descriptor back."""
        self.hang_up()
        self._socket.close()

    def _peek(self) -> bytes | None:
        """The next byte, none at the end; None: nothing has come."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _read(self, length: int) -> bytes:
        # Memory is taken as bytes come, not as they are announced.
        content = bytearray()
        while len(content) < length:
            with self._guarded():
                piece = self._socket.recv(min(PIECE_BYTES, length - len(content)))
            if not piece:
                raise LinkError(f"{self.host} hung up")
            content += piece
        return bytes(content)

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


def call(endpoint: Endpoint, secret: bytes, idle_s: float = IDLE_S) -> ReplicaLink:
    """Connect to the keeper at `endpoint`, trying its addresses in order, and make sure that it has the secret too.

    Raises:
        TurnedAwayError: it has hung up without a word. LinkError: no address answers, or it has another secret.
    """
    problems = []
    for address in endpoint.addresses:
        try:
            connection = socket.create_connection((address, endpoint.port), timeout=_GREETING_S / 2)
            break
        except OSError as error:
            problems.append(f"{address} port {endpoint.port}: {error.strerror or error}")
    else:
        raise LinkError(f"{endpoint.host} cannot be reached: {'; '.join(problems) or 'it has no address'}")
    link = ReplicaLink(connection, endpoint.host, min(idle_s, _GREETING_S))
    try:
        link.ask(secret)
    except BaseException:
        link.close()
        raise
    link.set_idle(idle_s)
    return link
