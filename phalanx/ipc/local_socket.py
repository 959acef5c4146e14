"""Small messages between processes of one host: packets over a Unix socket, with descriptors of memory beside them.

A connection is a Unix socket of kind SOCK_SEQPACKET, which keeps packets whole, in order, and is hung up by the kernel
when either process ends, however it ends. A packet is a JSON list of a kind and fields, so nothing is unpickled;
descriptors travel beside one (SCM_RIGHTS). What is longer than `PACKET_BYTES` belongs into memory that is handed over.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

PACKET_BYTES = 1 << 16
_MAX_DESCRIPTORS = 253  # SCM_MAX_FD of Linux


def send(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send `message`, a dataclass of JSON values, as one packet.

    Raises:
        OSError: the other side is gone; BlockingIOError: it is not, but the connection does not block and is full.
    """
    packet = json.dumps([type(message).__name__, *vars(message).values()]).encode()
    if descriptors:
        socket.send_fds(connection, [packet], list(descriptors), socket.MSG_NOSIGNAL)
    else:
        connection.send(packet, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket, kinds: Mapping[str, type]) -> tuple[Any, list[int]]:
    """Wait for the next packet and its descriptors; (None, []) when the other side is gone.

    Args:
        kinds: the classes of messages by their names.
    """
    try:
        packet, descriptors = _receive(connection)
    except ConnectionResetError:  # it left without reading all; what it had sent before comes first
        packet, descriptors = _receive(connection)
    if not packet:
        return None, []
    kind, *fields = json.loads(packet)
    return kinds[kind](*fields), descriptors


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    packet, descriptors, _, _ = socket.recv_fds(
        connection, PACKET_BYTES, _MAX_DESCRIPTORS, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    )
    return packet, descriptors


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is ours: any process of the host can find an abstract address."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())
