"""The loader process of a host: its messages to and from readers, and the thread that fills their slots.

One stream of batches is one connection (`phalanx.ipc.local_socket`).

    reader                     loader
    Hello ───────────────────►
    Wanted(0) … Wanted(a-1) ─►
          ◄─────────────────── Welcome + descriptors of the `a` slots
          ◄─────────────────── Ready(0)
    copies slot 0
    Wanted(a) ───────────────►                 which releases step 0: its slot may be filled again
          ◄─────────────────── Ready(1) …
          ◄─────────────────── Failed          in place of the first step that cannot be had

Its name is in Linux's abstract namespace ("@" stands for the zero byte), so no file is left behind.

In the loader process, one thread answers readers, reads samples and fills slots. It sleeps in one `select` on
everything that can happen, and works while a step is due; the stream that is furthest behind comes first.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from phalanx.core.errors import UserError
from phalanx.data.samples import Arrays
from phalanx.data.sharing.slots import DisagreementError, SlotRing, WriterSlot, fields_of
from phalanx.ipc import local_socket
from phalanx.ipc.codec import BadMessageError, PacketDecoder
from phalanx.ipc.local_socket import same_user

VERSION = 1
MAX_AHEAD = 128


class HostLoaderError(RuntimeError):
    """The loader process of this host is gone, cannot be reached, or cannot give what was asked of it."""


@dataclass(frozen=True)
class Hello:
    """A reader opens the `number`-th of its streams: it is data-parallel rank `index` of `ranks`."""

    version: int
    index: int
    ranks: int
    ahead: int
    number: int


@dataclass(frozen=True)
class Wanted:
    """The reader will read samples ``start..start+count`` as step `step`, and releases step ``step - ahead``."""

    step: int
    start: int
    count: int


@dataclass(frozen=True)
class Welcome:
    """The slots are in the descriptors that come along; `pid` is the loader's."""

    pid: int


@dataclass(frozen=True)
class Ready:
    """Step `step` is in slot ``step % ahead``: `rows` samples from `first` on, with documents or without."""

    step: int
    first: int
    rows: int
    length: int
    documents: bool


@dataclass(frozen=True)
class Failed:
    """No step comes any more; of a `UserError` with its fields, else `problem` alone."""

    user_error: bool
    problem: str
    cure: str = ""
    field: str | None = None
    text: str = ""


Message = Hello | Wanted | Welcome | Ready | Failed

_DECODER = PacketDecoder(Hello, Wanted, Welcome, Ready, Failed)


def failed_with(error: BaseException) -> Failed:
    """The message for `error`."""
    if isinstance(error, UserError):
        return Failed(True, error.problem, error.cure, error.field, str(error))
    return Failed(False, f"{type(error).__name__}: {error}")


def error_of(failed: Failed, who: str) -> Exception:
    """The exception to raise in a reader; a `UserError` has the text and field that it had in the loader."""
    if not failed.user_error:
        return HostLoaderError(f"{who} failed: {failed.problem}")
    where = failed.text.removesuffix(f"{failed.problem}; {failed.cure}").removesuffix(": ")
    error = UserError(failed.problem, cure=failed.cure, field=where or None)
    error.field = failed.field
    return error


def receive(connection: socket.socket) -> tuple[Message | None, list[int]]:
    """Wait for the next packet and its descriptors; (None, []) when the other side is gone."""
    return local_socket.receive(connection, _DECODER)


def listen() -> tuple[str, socket.socket]:
    """A new address on this host, and the socket that listens there."""
    address = f"@phalanx-loader-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_abstract(address))
    listener.listen(1024)
    return address, listener


def connect(address: str) -> socket.socket:
    """A connection to the loader at `address`; HostLoaderError: none listens there, or one of another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(_abstract(address))
    except OSError as error:
        connection.close()
        problem = "the process that started it is gone, or runs on another host or in another network namespace"
        raise HostLoaderError(f"no loader listens at {address} ({error.strerror}): {problem}") from error
    if not same_user(connection):
        connection.close()
        raise HostLoaderError(f"another user listens at {address}")
    return connection


def _abstract(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


Read = Callable[[int, int], Arrays]


def serve(listener: socket.socket, read: Read, readers: Mapping[int, int], life_fd: int) -> None:
    """Serve batches to the readers that connect to `listener`, until the other end of `life_fd` is closed; streams that
    are open then are served to their end.

    Args:
        listener: where readers connect.
        read: samples ``start..start+count`` of the global order.
        readers: how many readers each data-parallel index has on this host.
        life_fd: the read end of a pipe that the process which started this one holds open while it lives.
    """
    _Server(listener, read, readers, life_fd).run()


@dataclass
class _Shared:
    """A ring with its memory. `failure`: why no more is written into it."""

    ring: SlotRing
    slots: list[WriterSlot]
    ready: dict[int, Ready] = field(default_factory=dict)
    failure: Failed | None = None

    def fill(self, read: Read) -> Ready:
        due = self.ring.due()
        assert due is not None
        step, start, count = due
        share = count // self.ring.ranks
        first = start + self.ring.index * share
        arrays = read(first, share)
        (rows, length), documents = arrays.weights_BS.shape, arrays.documents_BS is not None
        fields, size_bytes = fields_of(rows, length, documents=documents)
        slot = step % self.ring.ahead
        self.slots[slot].write(fields, size_bytes, arrays)
        self.ready[slot] = Ready(step, first, rows, length, documents)
        self.ring.wrote()
        return self.ready[slot]

    @property
    def is_due(self) -> bool:
        return self.failure is None and self.ring.due() is not None


@dataclass
class _Reader:
    connection: socket.socket
    number: int
    shared: _Shared | None = None


class _Server:
    def __init__(self, listener: socket.socket, read: Read, readers: Mapping[int, int], life_fd: int) -> None:
        self._listener = listener
        self._read = read
        self._expected = dict(readers)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(life_fd, selectors.EVENT_READ, lambda: self._starter_is_gone(life_fd))
        self._readers: dict[int, _Reader] = {}
        self._rings: dict[tuple[int, int], _Shared] = {}
        self._accepted = 0
        self._ending = False

    def run(self) -> None:
        while not self._ending or self._readers:
            due = [shared for shared in self._rings.values() if shared.is_due]
            for key, _ in self._selector.select(0 if due else None):
                key.data()
            if due:
                self._write(min(due, key=lambda shared: shared.ring.written))

    def _starter_is_gone(self, life_fd: int) -> None:
        self._ending = True
        self._selector.unregister(life_fd)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if not local_socket.same_user(connection):
            connection.close()
            return
        reader = _Reader(connection, self._accepted)
        self._accepted += 1
        self._readers[reader.number] = reader
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(reader))

    def _hear(self, reader: _Reader) -> None:
        try:
            message, _ = receive(reader.connection)
            if message is None:
                self._drop(reader)
            elif isinstance(message, Hello):
                self._open(reader, message)
            elif isinstance(message, Wanted) and reader.shared is not None:
                # A reader without a ring was refused, and has not read that yet.
                shared = reader.shared
                if shared.ring.want(reader.number, message.step, message.start, message.count):
                    self._send(reader, shared.ready[message.step % shared.ring.ahead])
                elif shared.failure is not None:
                    self._send(reader, shared.failure)
        except OSError:
            self._drop(reader)
        except (BadMessageError, DisagreementError) as error:
            self._send(reader, Failed(False, str(error)))

    def _open(self, reader: _Reader, hello: Hello) -> None:
        if hello.version != VERSION or not 1 <= hello.ahead <= MAX_AHEAD:
            raise DisagreementError(f"the reader is of another version of this program: {hello}")
        shared = self._rings.get((hello.number, hello.index)) or self._new_ring(hello)
        if (hello.ranks, hello.ahead) != (shared.ring.ranks, shared.ring.ahead):
            here = f"ranks={hello.ranks}, ahead={hello.ahead} here"
            elsewhere = f"ranks={shared.ring.ranks}, ahead={shared.ring.ahead} elsewhere"
            who = f"ranks that share batches open stream {hello.number}"
            raise DisagreementError(f"{who} with {here}, {elsewhere}")
        shared.ring.join(reader.number)
        reader.shared = shared
        local_socket.send(reader.connection, Welcome(os.getpid()), [slot.reading for slot in shared.slots])

    def _new_ring(self, hello: Hello) -> _Shared:
        if hello.index not in self._expected:
            known = ", ".join(map(str, sorted(self._expected)))
            raise DisagreementError(
                f"the loader was told of data-parallel indices {known} on this host, not {hello.index}"
            )
        ring = SlotRing(hello.index, hello.ranks, hello.ahead, self._expected[hello.index])
        name = f"phalanx batches {hello.index}"
        shared = _Shared(ring, [WriterSlot(f"{name} slot {slot}") for slot in range(hello.ahead)])
        self._rings[hello.number, hello.index] = shared
        return shared

    def _write(self, shared: _Shared) -> None:
        """Fill the next slot of a ring, unless a message that has just come made it superfluous."""
        if not shared.is_due:
            return
        step = shared.ring.written
        try:
            answer: Ready | Failed = shared.fill(self._read)
        except Exception as error:
            answer = shared.failure = failed_with(error)
        for number in shared.ring.wanting(step):
            self._send(self._readers[number], answer)

    def _send(self, reader: _Reader, message: Ready | Failed) -> None:
        try:
            local_socket.send(reader.connection, message)
        except OSError:
            self._drop(reader)

    def _drop(self, reader: _Reader) -> None:
        """`reader` has gone; what it held is free, and its ring too when it was the last."""
        if self._readers.pop(reader.number, None) is None:
            return
        self._selector.unregister(reader.connection)
        reader.connection.close()
        shared = reader.shared
        if shared is None:
            return
        shared.ring.leave(reader.number)
        if shared.ring.is_over:
            for slot in shared.slots:
                slot.close()
            self._rings = {key: other for key, other in self._rings.items() if other is not shared}
