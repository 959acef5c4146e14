"""The messages between ranks and the keeper of their host, and both ends of that connection.

See `phalanx.ipc.local_socket` for how. What may be long (plans, state, inventories) travels as the descriptor of a
*document*: memory that holds it.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from phalanx.checkpoint.keeper_contract import KeeperLostError, RefusedError
from phalanx.ipc import local_socket
from phalanx.ipc.codec import PacketDecoder
from phalanx.ipc.shared_memory import read_document, write_document

VERSION = 2


class Hello(msgspec.Struct, frozen=True):
    """A rank begins a conversation."""

    version: int
    rank: int
    world_size: int


class Begin(msgspec.Struct, frozen=True):
    """See `phalanx.checkpoint.keeper_contract.Keeper.begin`."""

    attempt: int
    set_id: str
    shards: int


class ResumeFrom(msgspec.Struct, frozen=True):
    """Training goes on from this snapshot; see `Keeper.resume_from`; answered under `number`."""

    number: int
    step: int
    attempt: int
    set_id: str


class Lease(msgspec.Struct, frozen=True):
    """Asks for memory; documents: the plan, and the job's where there is one. `lease`: the rank's number for it."""

    lease: int
    slots: int
    destination: dict[str, Any] | None


class Replicate(msgspec.Struct, frozen=True):
    """See `Keeper.replicate_to`; `peer`: the fields of an `Endpoint`."""

    peer: list[Any] | None
    attempt: int
    secret: str


class Writing(msgspec.Struct, frozen=True):
    """From now on a slot does not hold what it held."""

    lease: int
    slot: int


class Copied(msgspec.Struct, frozen=True):
    """A slot holds a snapshot; the rest as in `phalanx.checkpoint.keeper_contract.Taken`. Document: state, metrics."""

    lease: int
    slot: int
    step: int
    stepped: bool
    persist: bool
    hurry: bool
    unix_ns: int


class Ask(msgspec.Struct, frozen=True):
    """For what is ``held``, or for the ``endpoint``; answered under `number`."""

    number: int
    what: str


class Read(msgspec.Struct, frozen=True):
    """For a committed copy; answered under `number` with descriptors of its memory and of its record and plan."""

    number: int
    step: int
    attempt: int
    set_id: str
    rank: int


class Release(msgspec.Struct, frozen=True):
    """The copy that was handed out under `number` is not being read any more."""

    number: int


class Finish(msgspec.Struct, frozen=True):
    """See `Keeper.finish`."""


class Stay(msgspec.Struct, frozen=True):
    """Somebody is about to connect: what ranks have finished so far is no reason to end; answered under 0."""


class End(msgspec.Struct, frozen=True):
    """The keeper shall end at once, whatever it holds."""


class Welcome(msgspec.Struct, frozen=True):
    """The answer to `Hello`; `attempt`: the highest that has been seen."""

    pid: int
    version: int
    attempt: int


class Memory(msgspec.Struct, frozen=True):
    """The slots of a lease, with a descriptor of each; or why there is none."""

    lease: int
    size_bytes: int
    slots: list[int] = []
    problem: str = ""


class Free(msgspec.Struct, frozen=True):
    """A slot of the lease that may be written to; -1: none."""

    lease: int
    slot: int


class Told(msgspec.Struct, frozen=True):
    """The fields of a `phalanx.checkpoint.keeper_contract.SnapshotProgress`."""

    fields: list[Any]


class Answer(msgspec.Struct, frozen=True):
    """To what was asked under `number`; what was asked for comes beside it, unless there is a problem."""

    number: int
    problem: str = ""


class Refused(msgspec.Struct, frozen=True):
    """The keeper hangs up, and why; `later_attempt`: as `phalanx.checkpoint.keeper_contract.RefusedError`."""

    why: str
    later_attempt: bool = True


_TO_KEEPER = (Hello, Begin, ResumeFrom, Lease, Replicate, Writing, Copied, Ask, Read, Release, Finish, Stay, End)
_TO_RANK = (Welcome, Memory, Free, Told, Answer, Refused)


_ANSWER_S = 120.0

Answered = tuple[Answer, list[int]]


class KeeperChannel:
    """A connection to the keeper at `address`.

    Args:
        on_message: called with every message but answers, and its descriptors, which are then its own.

    Raises:
        KeeperLostError: none listens there.
    """

    def __init__(self, address: Path, on_message: Callable[[Any, list[int]], None]) -> None:
        self._address = address
        self._on_message = on_message
        self._answers: dict[int, Answered] = {}
        self._asked = 0
        self._end: Exception | None = None
        self._decoder = PacketDecoder(*_TO_RANK)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.connect(str(address))
            if not local_socket.same_user(self._connection):
                raise PermissionError(0, "it is another user's")
        except OSError as error:
            self._connection.close()
            raise KeeperLostError(f"no keeper can be reached at {address}: {error.strerror or error}") from error
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLIN)

    def send(self, message: Any, *contents: bytes) -> None:
        """Send a message, with a document of each of `contents`."""
        if self._end is not None:
            raise self._end
        documents: list[int] = []
        try:
            documents.extend(write_document(content) for content in contents)
            local_socket.send(self._connection, message, documents)
        except (BrokenPipeError, ConnectionError):
            # The keeper has hung up: the last message that it sent may say why.
            while self._end is None:
                self._receive()
            raise self._end from None
        finally:
            _close(documents)

    def pump(self, timeout_s: float = 0.0) -> None:
        """Handle what has come, waiting for it so long at most."""
        timeout_ms = max(0, int(timeout_s * 1000) + (timeout_s > 0))
        while self._end is None and self._poll.poll(timeout_ms):
            self._receive()
            timeout_ms = 0
        if self._end is not None:
            raise self._end

    def ask(self, question: Callable[[int], Any]) -> Answered:
        """Send the question with this number, and wait for its answer; the descriptors beside it are the caller's."""
        self._asked += 1
        number = self._asked
        self.send(question(number))
        until_s = time.monotonic() + _ANSWER_S
        while number not in self._answers:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise KeeperLostError(f"the keeper at {self._address} has not answered for {_ANSWER_S:.0f} s")
            self.pump(left_s)
        return self._answers.pop(number)

    def close(self) -> None:
        """Hang up."""
        self._end = self._end or KeeperLostError("this connection has been closed")
        self._connection.close()
        for _, descriptors in self._answers.values():
            _close(descriptors)
        self._answers.clear()

    def _receive(self) -> None:
        try:
            message, descriptors = local_socket.receive(self._connection, self._decoder)
        except OSError:
            message, descriptors = None, []
        if message is None:
            self._end = KeeperLostError(f"the keeper at {self._address} is gone, and what it kept with it")
        elif isinstance(message, Refused):
            kind = RefusedError if message.later_attempt else KeeperLostError
            self._end = kind(f"the keeper at {self._address} has hung up: {message.why}")
        elif isinstance(message, Answer):
            self._answers[message.number] = message, descriptors
        else:
            self._on_message(message, descriptors)


def take_document(descriptor: int) -> bytes:
    """What is in a document, which is closed."""
    try:
        return read_document(descriptor)
    finally:
        os.close(descriptor)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_MAX_WAITING = 10_000


class RankConnection:
    """A connection that the keeper never waits for: what the other side is slow to read is kept until it does.

    Args:
        on_readable: called in the loop when there is something to `receive`.
    """

    def __init__(
        self, connection: socket.socket, selector: selectors.BaseSelector, on_readable: Callable[[], None]
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._selector = selector
        self._on_readable = on_readable
        self._decoder = PacketDecoder(*_TO_KEEPER)
        self._waiting: deque[tuple[Any, list[int]]] = deque()
        self.is_open = True
        selector.register(connection, selectors.EVENT_READ, self._ready)

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send now or later; `descriptors` remain the caller's. `receive` reports a broken connection."""
        if not self.is_open or len(self._waiting) >= _MAX_WAITING:
            return
        self._waiting.append((message, [os.dup(descriptor) for descriptor in descriptors]))
        self._flush()

    def receive(self) -> tuple[Any, list[int]]:
        """The next message; (None, []) when the other side is gone; BlockingIOError when there is none."""
        return local_socket.receive(self._connection, self._decoder)

    def close(self) -> None:
        """Hang up."""
        if not self.is_open:
            return
        self.is_open = False
        self._selector.unregister(self._connection)
        self._connection.close()
        while self._waiting:
            _close(self._waiting.popleft()[1])

    def _ready(self) -> None:
        if self._waiting:
            self._flush()
        self._on_readable()

    def _flush(self) -> None:
        while self._waiting:
            message, descriptors = self._waiting[0]
            try:
                local_socket.send(self._connection, message, descriptors)
            except BlockingIOError:
                break
            except OSError:  # it is gone, which shows when it is read from
                pass
            self._waiting.popleft()
            _close(descriptors)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._waiting else 0)
        self._selector.modify(self._connection, wanted, self._ready)


class Mailbox:
    """Lets any thread have something done in the loop."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._actions: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        selector.register(self._bell, selectors.EVENT_READ, self._deliver)

    def post(self, action: Callable[[], None]) -> None:
        """Have `action` called in the loop, soon."""
        self._actions.append(action)
        self.ring()

    def ring(self) -> None:
        """Have the loop go round once."""
        with suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)

    def _deliver(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while self._actions:
            try:
                self._actions.popleft()()
            except Exception:  # it must not cost the ranks what is in memory
                traceback.print_exc()
