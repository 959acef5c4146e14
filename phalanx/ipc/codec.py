"""One codec for processes that talk: typed messages as MessagePack, and packets of them that begin with their length.

A packet is four bytes with the length of what follows (little-endian), then MessagePack of a pair: the name of a
message's class, and its fields. Nothing is unpickled. What comes is held against the types of the fields, so whatever
the bytes are, the one error is `BadMessageError`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import msgspec

PACKET_BYTES = 1 << 16  # the longest packet, with its length; what is longer belongs into memory that is handed over
_LENGTH = struct.Struct("<I")
_BYTES_CODES = b"\xc4\xc5\xc6"  # MessagePack's bin 8, 16 and 32


class BadMessageError(ValueError):
    """The bytes are not a message that may come at this place."""


class TooLargeError(ValueError):
    """A message does not fit into a frame."""


class MessageDecoder:
    """Turns bytes into values of one type, which may be a union of `msgspec.Struct`."""

    def __init__(self, kind: object) -> None:
        self._decode: Callable[[bytes | msgspec.Raw], object] = msgspec.msgpack.Decoder(kind).decode

    def decode(self, content: bytes | msgspec.Raw) -> object:
        """The message. Raises BadMessageError: it is none; nothing else is ever raised, whatever the bytes are."""
        try:
            return self._decode(content)
        # ValueError for text that is not UTF-8, RecursionError for values nested without end.
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadMessageError(str(error)) from error


def encode(message: object, limit_bytes: int) -> bytes:
    """The bytes of a message, without its class. Raises TooLargeError: there are more than `limit_bytes`."""
    return _within(message, _encode(message), limit_bytes)


def to_packet(message: Any) -> bytes:
    """The packet of a message, a dataclass. Raises TooLargeError: it is longer than `PACKET_BYTES`."""
    name = type(message).__name__
    try:
        body = _encode((name, message))
    except UnicodeEncodeError:  # names of files need not be UTF-8 (Python's surrogates); JSON can escape them
        body = _encode((name, json.dumps(msgspec.to_builtins(message)).encode()))
    return _within(message, _LENGTH.pack(len(body)) + body, PACKET_BYTES)


class PacketDecoder:
    """The reverse of `to_packet`. `kinds`: the dataclasses that may come."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = {kind.__name__: (kind, MessageDecoder(kind)) for kind in kinds}
        self._pair = MessageDecoder(tuple[str, msgspec.Raw])

    def decode(self, packet: bytes) -> Any:
        """The message.

        Raises:
            BadMessageError: the packet is cut off, longer than it says, too long, or none of these messages.
        """
        if len(packet) < _LENGTH.size:
            raise BadMessageError(f"{len(packet)} bytes: a packet begins with {_LENGTH.size} that say its length")
        (length,) = _LENGTH.unpack_from(packet)
        there = len(packet) - _LENGTH.size
        if length > PACKET_BYTES - _LENGTH.size:
            raise BadMessageError(f"a packet says that {length} bytes follow: {PACKET_BYTES} is the most it may have")
        if there != length:
            raise BadMessageError(f"a packet has {there} of the {length} bytes that it says")
        # The fields stay raw until their type is known by the name.
        pair: Any = self._pair.decode(packet[_LENGTH.size :])
        name, fields = pair
        if name not in self._kinds:
            # Cut, since a name may be as long as a packet, and this goes into a log.
            raise BadMessageError(f"{name[:80]!r} is none of {', '.join(self._kinds)}")
        kind, decoder = self._kinds[name]
        try:
            # No message encodes as plain bytes, so these are the JSON of one whose text is not UTF-8.
            if bytes(fields)[0] in _BYTES_CODES:
                return msgspec.convert(json.loads(msgspec.msgpack.decode(fields, type=bytes)), kind)
            return decoder.decode(fields)
        except (ValueError, RecursionError) as error:
            raise BadMessageError(f"{name}: {error}") from error


def _within(message: object, content: bytes, limit_bytes: int) -> bytes:
    if len(content) > limit_bytes:
        kind = type(message).__name__
        raise TooLargeError(f"{kind} of {len(content)} bytes: a frame holds {limit_bytes}; send less in one message")
    return content


_encode = msgspec.msgpack.Encoder().encode
