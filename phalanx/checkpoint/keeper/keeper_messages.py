"""What ranks and the keeper of their host say to each other, and both ends of that connection.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.checkpoint.keeper_contract import KeeperLostError, RefusedError
from phalanx.ipc import local_socket
from phalanx.ipc.codec import PacketDecoder

VERSION = 2

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Hello:
    """A rank begins a conversation."""

    version: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class Begin:
    """See `phalanx.checkpoint.keeper_contract.Keeper.begin`."""

    attempt: int
    set_id: str
    shards: int


@dataclass(frozen=True)
class ResumeFrom:
    """Training goes on from this snapshot; see `Keeper.resume_from`; answered under `number`."""

    number: int
    step: int
    attempt: int
    set_id: str


@dataclass(frozen=True)
class Lease:
    """Asks for memory; documents: the plan, and the job's where there is one. `lease`: the rank's number for it."""

    lease: int
    slots: int
    destination: dict[str, Any] | None


@dataclass(frozen=True)
class Replicate:
    """See `Keeper.replicate_to`; `peer`: the fields of an `Endpoint`."""

    peer: list[Any] | None
    attempt: int
    secret: str


@dataclass(frozen=True)
class Writing:
    """From now on a slot does not hold what it held."""

    lease: int
    slot: int


@dataclass(frozen=True)
class Copied:
    """A slot holds a snapshot; the rest as in `phalanx.checkpoint.keeper_contract.Taken`. Document: state, metrics."""

    lease: int
    slot: int
    step: int
    stepped: bool
    persist: bool
    hurry: bool
    unix_ns: int


@dataclass(frozen=True)
class Ask:
    """For what is ``held``, or for the ``endpoint``; answered under `number`."""

    number: int
    what: str


@dataclass(frozen=True)
class Read:
    """For a committed copy; answered under `number` with descriptors of its memory and of its record and plan."""

    number: int
    step: int
    attempt: int
    set_id: str
    rank: int


@dataclass(frozen=True)
class Release:
    """The copy that was handed out under `number` is not being read any more."""

    number: int


@dataclass(frozen=True)
class Finish:
    """See `Keeper.finish`."""


@dataclass(frozen=True)
class Stay:
    """Somebody is about to connect: what ranks have finished so far is no reason to end; answered under 0."""


@dataclass(frozen=True)
class End:
    """The keeper shall end at once, whatever it holds."""


@dataclass(frozen=True)
class Welcome:
    """The answer to `Hello`; `attempt`: the highest that has been seen."""

    pid: int
    version: int
    attempt: int


@dataclass(frozen=True)
class Memory:
    """The slots of a lease, with a descriptor of each; or why there is none."""

    lease: int
    size_bytes: int
    slots: list[int] = field(default_factory=list)
    problem: str = ""


@dataclass(frozen=True)
class Free:
    """A slot of the lease that may be written to; -1: none."""

    lease: int
    slot: int


@dataclass(frozen=True)
class Told:
    """The fields of a `phalanx.checkpoint.keeper_contract.SnapshotProgress`."""

    fields: list[Any]


@dataclass(frozen=True)
class Answer:
    """To what was asked under `number`; what was asked for comes beside it, unless there is a problem."""

    number: int
    problem: str = ""


@dataclass(frozen=True)
class Refused:
    """The keeper hangs up, and why; `later_attempt`: as `phalanx.checkpoint.keeper_contract.RefusedError`."""

    why: str
    later_attempt: bool = True


_TO_KEEPER = (Hello, Begin, ResumeFrom, Lease, Replicate, Writing, Copied, Ask, Read, Release, Finish, Stay, End)
_TO_RANK = (Welcome, Memory, Free, Told, Answer, Refused)


def document(content: bytes) -> int:
    """The descriptor of memory that holds `content`, for another process to read; to be closed."""
    descriptor = os.memfd_create("checkpoint document", os.MFD_CLOEXEC)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def content_of(descriptor: int) -> bytes:
    """What is in a document."""
    parts: list[bytes] = []
    at = 0
    while part := os.pread(descriptor, _READ_BYTES, at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


_ANSWER_S = 120.0

Answered = tuple[Answer, list[int]]


class Channel:
    """A connection to the keeper at `address`.

    Args:
        hear: called with every message but answers, and its descriptors, which are then its own.

    Raises:
        KeeperLostError: none listens there.
    """

    def __init__(self, address: Path, hear: Callable[[Any, list[int]], None]) -> None:
        self._address = address
        self._hear = hear
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

    def check(self) -> None:
        """Raise what the connection ended with, if it has."""
        if self._end is not None:
            raise self._end

    def send(self, message: Any, *contents: bytes) -> None:
        """Send a message, with a document of each of `contents`."""
        self.check()
        documents: list[int] = []
        try:
            documents.extend(document(content) for content in contents)
            local_socket.send(self._connection, message, documents)
        except (BrokenPipeError, ConnectionError):
            self._read_to_end()
        finally:
            _close(documents)

    def pump(self, timeout_s: float = 0.0) -> None:
        """Hear what has come, waiting for it so long at most."""
        self.check()
        timeout_ms = max(0, int(timeout_s * 1000) + (timeout_s > 0))
        while self._poll.poll(timeout_ms):
            self._receive()
            self.check()
            timeout_ms = 0

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

    def _read_to_end(self) -> None:
        """The keeper has hung up: the last that it said may be why."""
        while self._end is None:
            self._receive()
        raise self._end

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
            self._hear(message, descriptors)


def take(descriptor: int) -> bytes:
    """What is in a document, which is closed."""
    try:
        return content_of(descriptor)
    finally:
        os.close(descriptor)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_MAX_WAITING = 10_000


class Line:
    """A connection that the keeper never waits for: what the other side is slow to read is kept until it does.

    Args:
        hear: called in the loop when there is something to `receive`.
    """

    def __init__(self, connection: socket.socket, selector: selectors.BaseSelector, hear: Callable[[], None]) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._selector = selector
        self._hear = hear
        self._decoder = PacketDecoder(*_TO_KEEPER)
        self._waiting: deque[tuple[Any, list[int]]] = deque()
        self.is_open = True
        selector.register(connection, selectors.EVENT_READ, self._ready)

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send now or later; `descriptors` remain the caller's. A line that is broken hears of it in `receive`."""
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
        self._hear()

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
