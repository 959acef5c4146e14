"""What processes are sent: bytes of their TCP sockets by sock_diag(7), and what they wait for. Linux, torch-free.

What a process receives with ``recv`` is in no counter of /proc/PID/io, and those of interfaces are of all processes. Of
sockets that are none of TCP nobody counts bytes.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import struct
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from phalanx.core.kernel_files import PROC, read_text

_SOCK_DIAG = 4  # the protocol of netlink
_BY_FAMILY = 20
_REQUEST_DUMP = 0x1 | 0x300
_ERROR, _DONE = 2, 3
_INFO = 2  # the attribute that holds a tcp_info
_ANY_STATE = 0xFFF & ~(1 << 6 | 1 << 10)  # but those in TIME_WAIT, which nobody has any more, and those that listen
_HEAD = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ASKED = struct.Struct("=BBBxI48x")  # inet_diag_req_v2: family, protocol, attributes, states, id
_TOLD_BYTES, _INODE_AT = 72, 68  # inet_diag_msg
_CARRIED = struct.Struct("=120xQQ")  # tcp_info: bytes_acked, bytes_received
_ANSWER_BYTES = 1 << 18
_PATIENCE_S = 1.0
_CHATTER_BYTES = 16 << 10
"""Heartbeats on one socket in the seconds between two looks are less."""

_IN_PIPE = re.compile(r"pipe_read")
_IN_SOCKET = re.compile(r"unix_stream_(?:read|data_wait)|skb_wait_for_more_packets|datagram")
"""Functions of the kernel in which a thread waits to be sent something: all but those of TCP."""

RECEIVING = {"x86_64": frozenset({0, 19, 45, 47}), "aarch64": frozenset({63, 65, 207, 212})}
"""Numbers of read, readv, recvfrom and recvmsg by machine, whose first argument is a descriptor."""


def tcp_bytes() -> dict[int, int] | None:
    """What each TCP socket of this network namespace has carried, sent and received, by its inode.

    Returns:
        None: the kernel does not tell.
    """
    found: dict[int, int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
            kernel.settimeout(_PATIENCE_S)
            for family in (socket.AF_INET, socket.AF_INET6):
                asked = _ASKED.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _ANY_STATE)
                kernel.send(_HEAD.pack(_HEAD.size + len(asked), _BY_FAMILY, _REQUEST_DUMP, family, 0) + asked)
                while not _take(kernel.recv(_ANSWER_BYTES), found):
                    pass
    except (OSError, AttributeError, struct.error):  # another system, a sandbox, or a module that is not loaded
        return None
    return found


def _take(answer: bytes, found: dict[int, int]) -> bool:
    """Take in messages; whether they were the last.

    Raises:
        OSError: the kernel refuses.
    """
    at = 0
    while at + _HEAD.size <= len(answer):
        length, kind, *_ = _HEAD.unpack_from(answer, at)
        if kind == _DONE:
            return True
        if kind == _ERROR or length < _HEAD.size:
            raise OSError("sock_diag is refused")
        told = answer[at + _HEAD.size : at + length]
        (inode,) = struct.unpack_from("=I", told, _INODE_AT)
        for attribute, value in _attributes(told[_TOLD_BYTES:]):
            if attribute == _INFO and len(value) >= _CARRIED.size:
                found[inode] = sum(_CARRIED.unpack_from(value))
        at += _aligned(length)
    return not answer


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            return
        yield kind, data[at + 4 : at + length]
        at += _aligned(length)


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def open_files(pid: int, proc: Path = PROC) -> Iterator[str]:
    """What the descriptors of a process stand for, such as ``/dev/null`` or ``socket:[123]``."""
    with suppress(OSError), os.scandir(proc / str(pid) / "fd") as entries:
        for entry in entries:
            with suppress(OSError):
                yield str(Path(entry.path).readlink())


def waits_for(pid: int, tcp: Container[int], proc: Path = PROC) -> str:
    """What the main thread of a process waits to be sent something by: "pipe", "socket" or nothing of these.

    Args:
        tcp: inodes of TCP sockets, which do not count.
    """
    task = proc / str(pid) / "task" / str(pid)
    where = read_text(task / "wchan") or "0"
    if where != "0":
        return "pipe" if _IN_PIPE.search(where) else "socket" if _IN_SOCKET.search(where) else ""
    link = _received_from(read_text(task / "syscall") or "", proc / str(pid) / "fd")
    kind, _, inode = link.rstrip("]").partition(":[")
    return kind if kind == "pipe" or (kind == "socket" and int(inode) not in tcp) else ""


def _received_from(call: str, descriptors: Path) -> str:
    """What the descriptor stands for from which a thread reads, by the line of /proc/PID/syscall; else empty."""
    number, descriptor, *_ = (*call.split(), "", "")
    if number.isdigit() and int(number) in RECEIVING.get(platform.machine(), ()):
        with suppress(OSError):
            return str((descriptors / str(int(descriptor, 16))).readlink())
    return ""


class CarriedBytes:
    """What the sockets of some processes have carried, since the first look."""

    def __init__(self) -> None:
        self._last: dict[int, int] | None = None
        self._bytes = 0

    def add(self, pids: Iterable[int], by_inode: Mapping[int, int], proc: Path = PROC) -> int:
        """Take in another look; a socket that several of them have counts once, and one that is new counts all.

        What has carried next to nothing since the last look does not count: a thousand ranks that hang say much
        together to the store that one of them holds.

        Args:
            by_inode: from `tcp_bytes`.
        """
        links = {link for pid in pids for link in open_files(pid, proc) if link.startswith("socket:[")}
        inodes = {int(link[8:-1]) for link in links}
        now = {inode: by_inode[inode] for inode in inodes if inode in by_inode}
        if self._last is not None:
            grown = (carried - self._last.get(inode, 0) for inode, carried in now.items())
            self._bytes += sum(one for one in grown if one >= _CHATTER_BYTES)
        self._last = now
        return self._bytes
