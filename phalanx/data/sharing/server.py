"""What runs in the loader process: one thread that hears readers, reads samples and fills slots. Torch-free.

It sleeps in one `select` on everything that can happen, and works while a step is due; the stream that is furthest
behind comes first.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from phalanx.core import packets
from phalanx.data.samples import Arrays
from phalanx.data.sharing import messages
from phalanx.data.sharing.messages import Failed, Hello, Ready, Wanted, Welcome
from phalanx.data.sharing.rings import DisagreementError, Ring
from phalanx.data.sharing.slots import WriterSlot, fields_of

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
        if not packets.same_user(connection):
            connection.close()
            return
        reader = _Reader(connection, self._accepted)
        self._accepted += 1
        self._readers[reader.number] = reader
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(reader))

    def _hear(self, reader: _Reader) -> None:
        try:
            message, _ = messages.receive(reader.connection)
            if message is None:
                self._drop(reader)
            elif isinstance(message, Hello):
                self._open(reader, message)
            elif isinstance(message, Wanted):
                self._want(reader, message)
        except OSError:
            self._drop(reader)
        except DisagreementError as error:
            self._tell(reader, Failed(False, str(error)))

    def _open(self, reader: _Reader, hello: Hello) -> None:
        if hello.version != messages.VERSION or not 1 <= hello.ahead <= messages.MAX_AHEAD:
            raise DisagreementError(f"the reader is of another version of this program: {hello}")
        shared = self._rings.get((hello.number, hello.index)) or self._new_ring(hello)
        if (hello.ranks, hello.ahead) != (shared.ring.ranks, shared.ring.ahead):
            asked = (
                f"ranks={hello.ranks}, ahead={hello.ahead} here, ranks={shared.ring.ranks}, ahead={shared.ring.ahead}"
            )
            raise DisagreementError(f"ranks that share batches open stream {hello.number} with {asked} elsewhere")
        shared.ring.join(reader.number)
        reader.shared = shared
        packets.send(reader.connection, Welcome(os.getpid()), [slot.reading for slot in shared.slots])

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
            told = shared.failure = messages.failed_with(error)
        for number in shared.ring.wanting(step):
            self._tell(self._readers[number], told)

    def _tell(self, reader: _Reader, message: Ready | Failed) -> None:
        try:
            packets.send(reader.connection, message)
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
