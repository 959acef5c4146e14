"""The socket between a launcher and a template that stays: whole messages, with descriptors beside them. Torch-free.

Both ends are processes of one program, over a socket that nobody else can open, so messages are pickled. What does not
fit into a packet goes into memory that is handed over beside it.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Sequence
from typing import Any

from phalanx.core.packets import PACKET_BYTES

_MAX_DESCRIPTORS = 253  # SCM_MAX_FD of Linux
_ELSEWHERE = b"m"  # a pickle of this protocol begins with another byte


class LineGoneError(Exception):
    """The process at the other end has hung up, or takes nothing more."""


class Line:
    """One end.

    Args:
        connection: a Unix socket of kind SOCK_SEQPACKET; if it does not block, neither does this.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._connection.fileno()

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message; the descriptors stay open here.

        Raises:
            LineGoneError: the other end is gone, or has not read for so long that nothing more fits.
        """
        packet = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        memory = -1
        try:
            if len(packet) > PACKET_BYTES:
                memory = _memory_of(packet)
                packet, descriptors = _ELSEWHERE, [memory, *descriptors]
            socket.send_fds(self._connection, [packet], list(descriptors), socket.MSG_NOSIGNAL)
        except OSError as error:
            raise LineGoneError(str(error)) from error
        finally:
            if memory >= 0:
                os.close(memory)

    def receive(self) -> tuple[Any, list[int]]:
        """The next message, and its descriptors, which are then the caller's.

        Raises:
            LineGoneError: the other end has hung up.
            BlockingIOError: there is none, and this end does not block.
        """
        try:
            packet, descriptors, _, _ = socket.recv_fds(
                self._connection, PACKET_BYTES, _MAX_DESCRIPTORS, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            )
        except BlockingIOError:
            raise
        except OSError as error:
            raise LineGoneError(str(error)) from error
        if not packet:
            raise LineGoneError("it has hung up")
        if packet == _ELSEWHERE:
            memory, *descriptors = descriptors
            with os.fdopen(memory, "rb") as file:
                file.seek(0)
                packet = file.read()
        return pickle.loads(packet), descriptors

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def _memory_of(packet: bytes) -> int:
    memory = os.memfd_create("phalanx message")
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(packet)
    except OSError:
        os.close(memory)
        raise
    return memory
