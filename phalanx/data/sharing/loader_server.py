"""The loader process of a host: its messages to and from readers, and the thread that fills their slots.

What a reader and the loader process of its host say to each other.

One stream of batches is one connection (`phalanx.ipc.local_socket`).

    reader                     loader
    Hello ───────────────────►
    Wanted(0) … Wanted(a-1) ─►
          ◄─────────────────── Welcome + descriptors of the `a` slots
          ◄─────────────────── Ready(0)
    copies slot 0
    Wanted(a) ───────────────►                 which lets go of step 0: its slot may be filled again
          ◄─────────────────── Ready(1) …
          ◄─────────────────── Failed          in place of the first step that cannot be had

Its name is in Linux's abstract namespace ("@" stands for the zero byte), so no file is left behind.

What runs in the loader process: one thread that hears readers, reads samples and fills slots.

It sleeps in one `select` on everything that can happen, and works while a step is due; the stream that is furthest
behind comes first.
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
from phalanx.data.sharing.slots import DisagreementError, Ring, WriterSlot, fields_of
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
    """The reader will read samples ``start..start+count`` as step `step`, and lets go of step ``step - ahead``."""

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
    """No step comes any more. `problem` and what follows are those of a `UserError`; else `problem` is all there is."""

    user_error: bool
    problem: str
    cure: str = ""
    field: str | None = None
    text: str = ""


Message = Hello | Wanted | Welcome | Ready | Failed

_DECODER = PacketDecoder(Hello, Wanted, Welcome, Ready, Failed)


def failed_with(error: BaseException) -> Failed:
    """`error` as it travels to the readers."""
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
    """A connection to the loader at `address`.

    Raises:
        HostLoaderError: nobody listens there, or somebody else's process does.
    """
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
    """Give the readers that connect to `listener` their batches, until the other end of `life_fd` is closed.

    Streams that are open then are still served to their end.

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

    ring: Ring
    slots: list[WriterSlot]
    ready: dict[int, Ready] = field(default_factory=dict)
    failure: Failed | None = None

    def fill(self, read: Read) -> Ready:
        """Read the step that is due into its slot."""
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
        """Whether there is a step to be written."""
        return self.failure is None and self.ring.due() is not None

    def close(self) -> None:
        """Give the memory back."""
        for slot in self.slots:
            slot.close()


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
            elif isinstance(message, Wanted):
                self._want(reader, message)
        except OSError:
            self._drop(reader)
        except (BadMessageError, DisagreementError) as error:
            self._tell(reader, Failed(False, str(error)))

    def _open(self, reader: _Reader, hello: Hello) -> None:
        if hello.version != VERSION or not 1 <= hello.ahead <= MAX_AHEAD:
            raise DisagreementError(f"the reader is of another version of this program: {hello}")
        shared = self._rings.get((hello.number, hello.index)) or self._new_ring(hello)
        if (hello.ranks, hello.ahead) != (shared.ring.ranks, shared.ring.ahead):
            asked = (
                f"ranks={hello.ranks}, ahead={hello.ahead} here, ranks={shared.ring.ranks}, ahead={shared.ring.ahead}"
            )
            raise DisagreementError(f"ranks that share batches open stream {hello.number} with {asked} elsewhere")
        shared.ring.join(reader.number)
        reader.shared = shared
        local_socket.send(reader.connection, Welcome(os.getpid()), [slot.reading for slot in shared.slots])

    def _new_ring(self, hello: Hello) -> _Shared:
        if hello.index not in self._expected:
            known = ", ".join(map(str, sorted(self._expected)))
            raise DisagreementError(
                f"the loader was told of data-parallel indices {known} on this host, not {hello.index}"
            )
        ring = Ring(hello.index, hello.ranks, hello.ahead, self._expected[hello.index])
        name = f"phalanx batches {hello.index}"
        shared = _Shared(ring, [WriterSlot(f"{name} slot {slot}") for slot in range(hello.ahead)])
        self._rings[hello.number, hello.index] = shared
        return shared

    def _want(self, reader: _Reader, wanted: Wanted) -> None:
        shared = reader.shared
        if shared is None:  # it was refused, and has not read so yet
            return
        if shared.ring.want(reader.number, wanted.step, wanted.start, wanted.count):
            self._tell(reader, shared.ready[wanted.step % shared.ring.ahead])
        elif shared.failure is not None:
            self._tell(reader, shared.failure)

    def _write(self, shared: _Shared) -> None:
        """Fill the next slot of a ring, if what has just been heard has not put an end to it."""
        if not shared.is_due:
            return
        step = shared.ring.written
        try:
            told: Ready | Failed = shared.fill(self._read)
        except Exception as error:
            told = shared.failure = failed_with(error)
        for number in shared.ring.wanting(step):
            self._tell(self._readers[number], told)

    def _tell(self, reader: _Reader, message: Ready | Failed) -> None:
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
            shared.close()
            self._rings = {key: other for key, other in self._rings.items() if other is not shared}
