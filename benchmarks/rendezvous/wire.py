"""The protocol of torch's TCPStore (torch/csrc/distributed/c10d/TCPStore.cpp), as a client speaks it.

A request is a byte that says which, then its arguments: strings and values as a 64-bit length and the bytes, lists as a
64-bit count and the items, all in the byte order of the machine.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

MAGIC = 0x3C85F7CE
_U64 = struct.Struct("=Q")


class Kind(IntEnum):
    """Requests that making groups uses."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    PING = 13


_KEYS = {Kind.CHECK, Kind.WAIT, Kind.MULTI_GET}
_SILENT = {Kind.VALIDATE, Kind.SET, Kind.APPEND, Kind.MULTI_SET}
_FIXED = {Kind.ADD: 8, Kind.DELETE_KEY: 8, Kind.CHECK: 1, Kind.WAIT: 1, Kind.PING: 4}


@dataclass(frozen=True)
class Request:
    """One request: its keys, its values (of ADD, the number; of PING and VALIDATE, four bytes), and the answer that the
    request before it must have had for this one to be made at all."""

    kind: Kind
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    only_after: bytes | None = None

    def moved(self, old: bytes, new: bytes) -> Request:
        """The same with `new` for `old` in its keys."""
        return replace(self, keys=tuple(key.replace(old, new) for key in self.keys))

    def encode(self) -> bytes:
        """As it goes over the wire."""
        head = bytes([self.kind])
        if self.kind in (Kind.VALIDATE, Kind.PING):
            return head + self.values[0]
        if self.kind in _KEYS:
            return head + _U64.pack(len(self.keys)) + b"".join(map(_string, self.keys))
        if self.kind is Kind.MULTI_SET:
            pairs = zip(self.keys, self.values, strict=True)
            return head + _U64.pack(len(self.keys)) + b"".join(_string(k) + _string(v) for k, v in pairs)
        if self.kind is Kind.ADD:
            return head + _string(self.keys[0]) + self.values[0]
        return head + _string(self.keys[0]) + b"".join(map(_string, self.values))

    def answer_bytes(self, got: bytes | bytearray) -> int | None:
        """How long the answer is that begins with `got`; None: too little of it is there to say."""
        if self.kind in _SILENT:
            return 0
        if self.kind in _FIXED:
            return _FIXED[self.kind]
        end = 0
        for _ in range(len(self.keys) if self.kind is Kind.MULTI_GET else 1):
            if len(got) < end + 8:
                return None
            end += 8 + _U64.unpack_from(got, end)[0]
        return end


def requests(stream: bytearray) -> Iterator[Request]:
    """Take the requests that are complete out of a stream of what a client sent.

    Raises:
        ValueError: a request that is not known here.
    """
    while stream:
        read = _Reader(stream)
        try:
            request = _request(read)
        except IndexError:
            return
        del stream[: read.at]
        yield request


class _Reader:
    def __init__(self, stream: bytearray) -> None:
        self.stream, self.at = stream, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.stream):
            raise IndexError("the stream ends within a request")
        self.at += count
        return bytes(self.stream[self.at - count : self.at])

    def number(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def string(self) -> bytes:
        return self.take(self.number())


def _request(read: _Reader) -> Request:
    kind = Kind(read.take(1)[0])
    if kind in (Kind.VALIDATE, Kind.PING):
        return Request(kind, (), (read.take(4),))
    if kind in _KEYS:
        return Request(kind, tuple(read.string() for _ in range(read.number())))
    if kind is Kind.MULTI_SET:
        pairs = [(read.string(), read.string()) for _ in range(read.number())]
        return Request(kind, tuple(k for k, _ in pairs), tuple(v for _, v in pairs))
    key = read.string()
    if kind is Kind.ADD:
        return Request(kind, (key,), (read.take(8),))
    values = {Kind.SET: 1, Kind.APPEND: 1, Kind.COMPARE_SET: 2}.get(kind, 0)
    return Request(kind, (key,), tuple(read.string() for _ in range(values)))


def _string(text: bytes) -> bytes:
    return _U64.pack(len(text)) + text
