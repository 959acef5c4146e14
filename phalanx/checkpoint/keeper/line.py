"""The keeper's end of a connection to a rank, and a box for what its other threads have to say. Torch-free."""

from __future__ import annotations

import os
import selectors
import socket
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from phalanx.checkpoint.keeper.messages import KINDS
from phalanx.ipc import local_socket

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
        return local_socket.receive(self._connection, KINDS)

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


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
