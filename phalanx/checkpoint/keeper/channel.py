"""A rank's end of the connection to its keeper: what it says, and what it hears. Torch-free."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.checkpoint.keeper import messages
from phalanx.checkpoint.keeper.contract import KeeperLostError
from phalanx.checkpoint.replicas.contract import RefusedError
from phalanx.ipc import local_socket

_ANSWER_S = 120.0

Answered = tuple[messages.Answer, list[int]]


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
            documents.extend(messages.document(content) for content in contents)
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
            message, descriptors = local_socket.receive(self._connection, messages.KINDS)
        except OSError:
            message, descriptors = None, []
        if message is None:
            self._end = KeeperLostError(f"the keeper at {self._address} is gone, and what it kept with it")
        elif isinstance(message, messages.Refused):
            kind = RefusedError if message.later_attempt else KeeperLostError
            self._end = kind(f"the keeper at {self._address} has hung up: {message.why}")
        elif isinstance(message, messages.Answer):
            self._answers[message.number] = message, descriptors
        else:
            self._hear(message, descriptors)


def take(descriptor: int) -> bytes:
    """What is in a document, which is closed."""
    try:
        return messages.content_of(descriptor)
    finally:
        os.close(descriptor)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
