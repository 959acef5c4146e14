"""The frames that come a million times, without the general protocol: whole masked ones in, small ones out.

websockets' own parser does everything else, and this gives what it would give; it takes a tenth of the time
(docs/benchmarks/run.md).
"""

from __future__ import annotations

import struct

try:
    from websockets.speedups import apply_mask
except ImportError:  # no compiled part for this machine
    from websockets.utils import apply_mask

_WHOLE_BINARY = 0x82
_MASKED = 0x80
_LENGTH_16 = 126
_LENGTH_64 = 127
_SMALL = [bytes((_WHOLE_BINARY, length)) for length in range(_LENGTH_16)]


def size_of(data: bytes) -> int | None:
    """How long the frame is that these data begin with, head and all; None: too little has come to tell."""
    if len(data) < 2:
        return None
    length, head = data[1] & ~_MASKED, 2
    if length == _LENGTH_16:
        length, head = int.from_bytes(data[2:4], "big"), 4
    elif length == _LENGTH_64:
        length, head = int.from_bytes(data[2:10], "big"), 10
    if len(data) < head:
        return None
    return head + (4 if data[1] & _MASKED else 0) + length


def content_of(data: bytes) -> bytes | None:
    """The content, when the data are one whole, masked, binary frame of less than 64 KiB; None: something else."""
    if len(data) < 6 or data[0] != _WHOLE_BINARY or not data[1] & _MASKED:
        return None
    length, head = data[1] ^ _MASKED, 2
    if length == _LENGTH_16:
        length, head = int.from_bytes(data[2:4], "big"), 4
    elif length == _LENGTH_64:
        return None
    if len(data) != head + 4 + length:
        return None
    return bytes(apply_mask(data[head + 4 :], data[head : head + 4]))


def small(content: bytes) -> bytes:
    """The same for a content of less than 126 bytes."""
    return _SMALL[len(content)] + content


def framed(content: bytes) -> bytes:
    """A server's binary frame with this content; the same bytes do for every connection."""
    length = len(content)
    if length < _LENGTH_16:
        return bytes((_WHOLE_BINARY, length)) + content
    if length < 1 << 16:
        return struct.pack(">BBH", _WHOLE_BINARY, _LENGTH_16, length) + content
    return struct.pack(">BBQ", _WHOLE_BINARY, _LENGTH_64, length) + content
