"""Small messages between processes of one host: packets over a Unix socket, with descriptors of memory beside them.

A connection is a Unix socket of kind SOCK_SEQPACKET, which keeps packets whole, in order, and is hung up by the kernel
when either process ends, however it ends. Packets are those of `phalanx.ipc.codec`; descriptors travel beside one
(SCM_RIGHTS). What is longer than `PACKET_BYTES` belongs into memory that is handed over.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from phalanx.ipc.codec import PACKET_BYTES, BadMessageError, PacketDecoder, to_packet

_MAX_DESCRIPTORS = 253  # SCM_MAX_FD of Linux


def send(connection: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send `message`, a dataclass, as one packet.

    Raises:
        TooLargeError: it is longer than `PACKET_BYTES`.
        OSError: the other side is gone; BlockingIOError: it is not, but the connection does not block and is full.
    """
    packet = to_packet(message)
    if descriptors:
        socket.send_fds(connection, [packet], list(descriptors), socket.MSG_NOSIGNAL)
    else:
        connection.send(packet, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket, decoder: PacketDecoder) -> tuple[Any, list[int]]:
    """Wait for the next packet and its descriptors; (None, []) when the other side is gone.

    Raises:
        BadMessageError: the packet is none of them; its descriptors are closed.
    """
    try:
        packet, descriptors = _receive(connection)
    except ConnectionResetError:  # it left without reading all; what it had sent before comes first
        packet, descriptors = _receive(connection)
    if not packet:
        return None, []
    try:
        return decoder.decode(packet), descriptors
    except BadMessageError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    packet, descriptors, _, _ = socket.recv_fds(
        connection, PACKET_BYTES, _MAX_DESCRIPTORS, getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    )
    return packet, descriptors


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is ours: any process of the host can find an abstract address."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())
